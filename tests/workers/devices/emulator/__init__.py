"""Tests of the emulator itself."""
