"""One file per command. A command's module is imported when the command is asked for."""
