"""The command line's first and last moments: `oled-moe`, and `python -m oled_moe`.

Whoever presses Ctrl-C gets one line and the exit code 130 from here on, also while torch is being
loaded: an exception there may be lost, or come out as another one. Imports nothing that takes time.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """Run the command line; returns its exit code."""
    # Whoever starts a program that is not to be interrupted has this ignored already.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not is_ignored:
        signal.signal(signal.SIGINT, _interrupt)
    from oled_moe.cli import main as run

    code = run()
    if not is_ignored:
        # All is said and done; what is left of the interpreter need not be ended in order.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End at once where modules are being imported, which leaves nothing half done; else raise."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave() -> None:
    clear = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            if "--json" in sys.argv:
                sys.stdout.write(
                    f'{{"error": {{"message": "interrupted", "exit_code": {_INTERRUPTED}}}}}\n'
                )
            sys.stdout.flush()
        os.write(2, f"{clear}error: interrupted\n".encode())
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
