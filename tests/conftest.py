"""Settings of all tests: property tests draw the same examples on every machine and run."""

from hypothesis import settings

# No deadline: the machines that run these are shared, and time is not what they test.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
