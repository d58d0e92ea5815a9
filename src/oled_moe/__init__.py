"""OLED-MoE: runs mixture-of-experts diffusion language models larger than the memory at hand.

The names below are the promise to users; everything is imported on first use, so that
`oled-moe --help` and the simulator never wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oled_moe.config import EngineConfig as EngineConfig
    from oled_moe.config import SamplingParams as SamplingParams
    from oled_moe.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "SamplingParams", "__version__"]

_HOME = {
    "Engine": "oled_moe.engine",
    "EngineConfig": "oled_moe.config",
    "SamplingParams": "oled_moe.config",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
