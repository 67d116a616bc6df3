"""How the forecast knows: published speeds, the steps behind them, what compiling changes, and the fit to all this."""
