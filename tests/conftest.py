"""Settings of all tests: one thread, and the same drawn examples on every machine and run."""

import functools
import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from products import FULL_EXAMPLES

# A shell's background jobs inherit an ignored SIGINT; the tests of Ctrl-C need the usual one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny products are fastest so, and a second thread waits long where the machine is shared.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: time is not what these test.
settings.register_profile("part", derandomize=True, deadline=None)
PART = settings.get_profile("part")
settings.register_profile("full", PART, max_examples=FULL_EXAMPLES * PART.max_examples)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run what the default run leaves out: products.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "part")
    # Six thousand tests and what they import stay: nothing of it is worth looking through, now or
    # at every collection of garbage from here on.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# Files of few and long tests, and those that wait for other processes: first, so that in the end
# neither of two processes is left alone with one.
FIRST = ("test_ray_serve", "test_triton", "test_gpu_check", "test_cli_serve", "test_golden")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What products.py marks `full` runs with --full alone; files of long tests come first."""
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if config.getoption("--full"):
        # Only a test that hangs may meet its limit, and more examples take longer.
        limit_s = FULL_EXAMPLES * float(config.getini("timeout"))
        for item in items:
            item.add_marker(pytest.mark.timeout(limit_s))
    else:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Numbers drawn without a generator of their own are the same in every run, too."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def shared_texts() -> Iterator[None]:
    """Predictions of a module replay the same made-up texts; making them is half of the time."""
    from oled_moe.synthesis import synthesize

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oled_moe.prediction.synthesize", functools.lru_cache(synthesize))
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The command line sets up logging for the whole process, to a stream that ends with the test.

    Left in place it would be what servers of later tests write to.
    """
    root = logging.getLogger()
    handlers, level = set(root.handlers), root.level
    yield
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
