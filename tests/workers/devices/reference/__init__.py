"""Tests of workers.devices.reference."""
