"""What a run was told: every flag of every command, and how a command ends. Only `here` needs torch."""
