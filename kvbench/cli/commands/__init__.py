"""One file per command. A command's module is imported when the user calls the command."""
