"""The forms of tool calls, parsed while they are generated."""
