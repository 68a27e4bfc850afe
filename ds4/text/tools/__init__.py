"""Parsers of tool calls, one file for each way that models write them."""
