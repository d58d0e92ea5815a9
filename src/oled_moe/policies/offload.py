"""OffloadPolicy: the parts that decide for one run, and what a builder of one is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import AllocationPolicy
from oled_moe.policies.clairvoyant import DemandFuture, OraclePolicy
from oled_moe.policies.dispatch import DispatchPolicy
from oled_moe.policies.placement import PlacementPolicy
from oled_moe.policies.prefetch import PrefetchPolicy
from oled_moe.policies.retention import RetentionPolicy
from oled_moe.types import ForwardContext, ForwardOutcome, MoeShape


class ForwardListener(Protocol):
    """A part of a policy that follows forwards and requests as a whole."""

    def start_forward(self, context: ForwardContext) -> None:
        """Before the first layer."""
        ...

    def end_forward(self, outcome: ForwardOutcome) -> None:
        """After the last layer, once the logits were looked at."""
        ...

    def end_request(self, request_id: int) -> None:
        """A request has finished or was given up; its rows will not come again."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Everything that decides for one run; its parts hold state, so it serves one engine.

    One object may play several parts and is then named in each. `is_global`: all slots are one
    pool over the layers, ranked by `retention`, which is then a GlobalRetentionPolicy.
    `spares_running`: prompts take no slot from what requests at work used in the latest denoising
    forward; it goes with `prefill=tail`. `is_synchronous`: copies block the
    layer (see `LayerPlan.wave_sizes`). `needs` names optional inputs without which it cannot work:
    "gate_scores" of LayerDemand, "input_embedding" and "token_ids" of ForwardContext. `oracle`
    replaces all other parts but dispatch, and works in simulation only.
    """

    name: str
    retention: RetentionPolicy
    allocation: AllocationPolicy
    dispatch: DispatchPolicy
    prefetch: PrefetchPolicy | None = None
    placement: PlacementPolicy | None = None
    listeners: tuple[ForwardListener, ...] = ()
    is_global: bool = False
    spares_running: bool = False
    is_synchronous: bool = False
    needs: frozenset[str] = frozenset()
    oracle: OraclePolicy | None = None


class Parameters:
    """The `key=value` pairs of a policy's name, read as what they must be.

    `kind`: whose they are, for messages.
    Raises: ConfigError naming the parameter, its text and what is allowed.
    """

    def __init__(self, values: Mapping[str, str], *, kind: str = "policy") -> None:
        self._values = values
        self._kind = kind

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Parameters that mean nothing here are errors, never dropped."""
        for name in names:
            if name in self._values:
                raise ConfigError(f"{self._kind} parameter {name} has no effect: {reason}")

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        text = self._values.get(name, default)
        if text not in allowed:
            raise ConfigError(
                f"{self._kind} parameter {name} is {text!r}; allowed: {', '.join(allowed)}"
            )
        return text

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def integer(self, name: str, default: int | None, *, minimum: int, maximum: int) -> int | None:
        """A whole number within bounds; `default` where it is not given."""
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise ConfigError(
                f"{self._kind} parameter {name} is {text!r}; allowed: a whole number, "
                f"{minimum} to {maximum}"
            )
        return value

    def real(
        self, name: str, default: float | None, *, minimum: float = 0.0, maximum: float = 1.0
    ) -> float | None:
        """A number within bounds; `default` where it is not given."""
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:
            raise ConfigError(
                f"{self._kind} parameter {name} is {text!r}; allowed: a number, "
                f"{minimum:g} to {maximum:g}"
            )
        return value


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a builder may use. `spec` is the name with parameters, as given; `future` is known to
    clairvoyant policies alone."""

    spec: str
    shape: MoeShape
    costs: CostModel
    parameters: Parameters
    future: DemandFuture | None = None


Builder = Callable[[PolicyInputs], OffloadPolicy]


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One line of the registry; `parameters` are the keys its builder understands.

    `is_clairvoyant`: needs the whole trace ahead, so it runs in simulation only.
    """

    build: Builder
    summary: str
    source: str
    parameters: tuple[str, ...] = ()
    is_clairvoyant: bool = False
