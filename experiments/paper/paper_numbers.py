"""The numbers of the OLED-MoE paper (EuroSys '27, arXiv 2609.33385), in one place.

Each comes with how well it is known: "P" is stated in the paper's text, "I" was read from a plot or
inferred by this project. Nothing in a run looks at these; tables quote them beside ours. Shares are
0 to 1, times in seconds.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PaperNumber:
    value: Any
    label: str
    says: str


ABSTRACT = {
    "tpot_speedup": PaperNumber((1.23, 7.93), "P", "TPOT lower by 1.23x to 7.93x"),
    "utilization_gain": PaperNumber((1.44, 4.23), "P", "utilisation higher by 1.44x to 4.23x"),
    "over_full_residency": PaperNumber(0.23, "P", "23 % over full residency with 40 % of experts"),
}

FIG_4A = {
    "active_share": PaperNumber(
        {"math": 0.226, "code": 0.255, "quiz": 0.242}, "P", "share of experts active, mini"
    ),
    "over_one_token": PaperNumber(
        {"math": 7.2, "code": 8.2, "quiz": 7.7}, "P", "active experts over one token's"
    ),
}
FIG_4B = {
    "flops_over_one_token": PaperNumber(16.0, "P", "FLOPs of a block of 16 over one token's"),
    "block_flops": PaperNumber(805.31e6, "P", "FLOPs as printed, mini"),
}
FIG_5 = {
    "over_ideal": PaperNumber((1.70, 8.16), "P", "prior systems' TPOT over the ideal's"),
    "utilization_below": PaperNumber(
        (0.175, 0.732), "P", "prior systems' utilisation below the ideal's"
    ),
}
FIG_7 = {
    "hidden_cosine": PaperNumber(0.98, "P", "hidden cosine, up to"),
    "adjacent": PaperNumber((0.85, 0.90), "P", "overlap of adjacent steps"),
    "boundary": PaperNumber(0.65, "P", "overlap across a block boundary, above"),
}
FIG_10 = {
    "stability_low": PaperNumber(0.60, "I", "mean stability at confidence 0.05"),
    "stability_high": PaperNumber(0.81, "I", "mean stability at confidence 0.95"),
    "all_kept_low": PaperNumber(0.13, "P", "share with all experts kept at confidence 0.05"),
    "all_kept_high": PaperNumber(0.42, "P", "share with all experts kept at confidence 0.95"),
    "active": PaperNumber({"mini": 60, "flash": 90}, "P", "mean active experts of 256"),
}
FIG_12 = {
    "mean_speedup": PaperNumber(1.95, "P", "TPOT over the strongest baseline's, mean"),
    "max_speedup": PaperNumber(3.73, "P", "the same, up to"),
    "utilization": PaperNumber(
        (0.515, 0.777), "P", "mean utilisation, strongest baseline and OLED"
    ),
    # Their mean is 3.1, not 1.95: over all baselines, then, not over the strongest alone.
    "mean_speedup_by_model": PaperNumber({"mini": 1.64, "flash": 4.55}, "P", "mean by model"),
}
FIG_13 = {
    "gap": PaperNumber(
        {
            "mini": (0.1026, 0.0193, 0.0394, 0.0628, 0.0586, 0.0208),
            "flash": (0.1522, 0.1176, 0.0454, 0.0898, 0.1001, 0.0470),
        },
        "P",
        "TPOT over the ideal's; which cache size each belongs to is not known",
    ),
}
FIG_14 = {
    "active_share": PaperNumber(
        {"mini": (0.7895, 0.8670, 0.9365), "flash": (0.8199, 0.8795, 0.9157)},
        "P",
        "share of experts active in prefill, by prompt length",
    ),
    "ttft_s": PaperNumber({"mini": (0.39, 0.70), "flash": (2.80, 3.65)}, "P", "range of TTFT"),
}
FIG_15A = {
    "steps": PaperNumber(
        {"priority": -0.2056, "adapt": -0.0909, "coop": -0.0914}, "P", "TPOT, each on top, mean"
    ),
    "whole": PaperNumber({40: -0.537, 100: -0.345}, "P", "TPOT, whole against naive LRU, by C"),
    "whole_by_model": PaperNumber({"mini": -0.378, "flash": -0.505}, "P", "the same, by model"),
}
FIG_17A = {
    "over_full_residency": PaperNumber(
        {"mini": 0.32, "flash": 0.23}, "P", "TPOT at C=100 over full residency; flash estimated"
    ),
}
FIG_18B = {
    "overhead_s": PaperNumber((3.69e-3, 6.03e-3), "P", "policy overhead per forward"),
    "overhead_share": PaperNumber((0.0059, 0.0453), "P", "the same as a share of the forward"),
    # priority / adaptation / split, in % of a forward; which of the smaller two is which: unsure.
    "parts": PaperNumber(
        {
            ("mini", 40): (0.0214, 0.0093, 0.0045),
            ("mini", 100): (0.0279, 0.0119, 0.0055),
            ("flash", 40): (0.0032, 0.0016, 0.0011),
            ("flash", 100): (0.0063, 0.0026, 0.0019),
        },
        "I",
        "read from the figure",
    ),
    "forward_s": PaperNumber(
        {("mini", 40): 0.105, ("mini", 100): 0.081, ("flash", 40): 1.022, ("flash", 100): 0.530},
        "P",
        "time of a forward",
    ),
}
