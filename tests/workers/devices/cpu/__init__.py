"""Tests of the CPU engine."""
