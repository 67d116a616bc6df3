"""Plans of a whole training: its parts with their speeds, the best switches, prices, limits, and the sheet to send."""
