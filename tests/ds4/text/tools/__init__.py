"""Tests of ds4/text/tools."""
