"""Settings of all tests: one thread, and the same drawn examples on every machine and run."""

import signal

import torch
from hypothesis import settings

# A shell's background jobs inherit an ignored SIGINT; the tests of Ctrl-C need the usual one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny products are fastest so, and a second thread waits long where the machine is shared.
torch.set_num_threads(1)

# No deadline: time is not what these test.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
