"""The command line: parses options, calls the other packages, prints their results.

`app` is the program, `index` lists the commands, and each file in `commands` is one command. No other package imports
`cli`.
"""
