"""Scores of prompts on the GPU."""

from tests.gpu.again import take
from tests.workers.devices.cuda import test_device_scores

take(test_device_scores, globals())
