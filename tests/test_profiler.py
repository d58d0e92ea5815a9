"""Measurements with tiny sizes, faults injected, and the profile made of handmade ones."""

import errno
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oled_moe import disk_speed, profiler
from oled_moe.costs import DEFAULT_PROFILE, CostModel, load_profile
from oled_moe.disk_speed import QUEUE_DEPTHS, DiskRead, best_disk_read
from oled_moe.errors import ConfigError, DoesNotFitError, OledMoeError
from oled_moe.machine import machine_facts
from oled_moe.measuring import FULL, Effort, Figure
from oled_moe.profiler import (
    COPY_SHARES,
    DENSE_ROWS,
    EXPERT_ROWS,
    CopyTime,
    ExpertTime,
    GpuMeasurements,
    Measurements,
    ProductTime,
    default_profile_path,
    fit_affine,
    measure_gpu,
    measure_hardware,
    save_profile,
    to_profile,
)
from oled_moe.quantization import QuantSpec
from oled_moe.store import DiskExpertStore, ExpertLayout

MIB = 2**20
TINY = Effort(
    max_working_set_bytes=2 * MIB,
    max_matrix_size=32,
    max_scratch_bytes=MIB,
    num_repetitions=2,
    num_expert_calls=3,
    step_budget_s=0.05,
    write_budget_s=5.0,
)


def measure(directory: Path, **changes: Any) -> Measurements:
    parameters: dict[str, Any] = {
        "device": "cpu",
        "directory": directory,
        "expert_shape": (64, 48),
        "dtype": torch.float32,
        "threads": 1,
        "effort": TINY,
    }
    return measure_hardware(**{**parameters, **changes})


def check_figure(figure: Figure) -> None:
    assert 0 < figure.minimum <= figure.median <= figure.maximum
    assert figure.num_repetitions >= 1


# Whole measurements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_everything(dtype: torch.dtype, tmp_path: Path) -> None:
    steps: list[str] = []
    before = torch.get_num_threads()
    found = measure(tmp_path, dtype=dtype, threads=2, report=steps.append)
    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []
    assert len(steps) == len(set(steps)) == 7
    for figure in (
        found.memory_copy_bytes_per_s,
        found.memory_read_bytes_per_s,
        found.matrix_flops_per_s,
        found.expert_copy_s,
    ):
        check_figure(figure)
    assert [time.num_rows for time in found.expert_times] == list(EXPERT_ROWS)
    for expert_time in found.expert_times:
        check_figure(expert_time.seconds)
    assert found.memory_copy_threads in (1, 2) and found.memory_read_threads in (1, 2)
    assert found.working_set_bytes <= TINY.max_working_set_bytes
    assert found.matrix_size == TINY.max_matrix_size
    methods = [read.method for read in found.disk_reads]
    assert methods.count("buffered") == len(QUEUE_DEPTHS)
    if methods.count("direct") != len(QUEUE_DEPTHS):
        assert any("O_DIRECT" in warning for warning in found.warnings)
    for read in found.disk_reads:
        check_figure(read.bytes_per_s)
        check_figure(read.tiny_read_s)
    assert 0 < found.scratch_bytes <= TINY.max_scratch_bytes + MIB // 8
    kinds = {(product.operation, product.dtype) for product in found.products}
    assert kinds == {(o, d) for o in ("expert", "dense") for d in ("bfloat16", "float32")}
    for product in found.products:
        check_figure(product.seconds)
        assert product.place == "cpu" and product.weight_bytes > 0
    sizes = [copy.num_bytes / found.expert_bytes for copy in found.copies]
    assert sizes == list(COPY_SHARES)
    json.loads(json.dumps(found.to_dict(), allow_nan=False))


@pytest.mark.parametrize("form", ["int4-g64", "int8-row"])
def test_quantised_experts_are_measured_where_asked_for(form: str, tmp_path: Path) -> None:
    found = measure(tmp_path, dtype=torch.bfloat16, quant=QuantSpec.parse(form))
    own = [product for product in found.products if product.dtype == form]
    assert [product.num_rows for product in own] == list(EXPERT_ROWS)
    plain = next(product for product in found.products if product.operation == "expert")
    for product in own:
        check_figure(product.seconds)
        assert (product.place, product.operation) == ("cpu", "expert")
        assert 0 < product.weight_bytes < plain.weight_bytes
    path = tmp_path / "profile.json"
    save_profile(to_profile(found, "cpu"), path)
    rates = load_profile(path).weight_rates
    assert {rate.num_rows for rate in rates if rate.dtype == form} == set(EXPERT_ROWS)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_profile_of_a_measurement_survives_its_file(device: str, tmp_path: Path) -> None:
    profile = to_profile(measure(tmp_path), device)
    path = tmp_path / "new" / "folder" / "hardware.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert profile.is_measured
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_small_weights_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**machine_facts(), "last_level_cache_bytes": 64 * MIB}
    monkeypatch.setattr(profiler, "machine_facts", lambda: facts)
    assert any("last-level cache" in warning for warning in measure(tmp_path).warnings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cuda"}, "device"),
        ({"expert_shape": (0, 8)}, "hidden size"),
        ({"expert_shape": (8, 2.5)}, "intermediate size"),
        ({"dtype": torch.int8}, "dtype"),
        ({"threads": 0}, "threads"),
    ],
)
def test_bad_parameter_is_named(changes: Mapping[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        measure(tmp_path, **changes)


def test_experts_larger_than_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "usable_memory_bytes", lambda **_: 100_000)
    with pytest.raises(DoesNotFitError, match="smaller experts"):
        measure(tmp_path)


# Faults


def test_absent_directory_leaves_the_rest_measured(tmp_path: Path) -> None:
    found = measure(tmp_path / "absent")
    assert found.disk_reads == () and found.scratch_bytes == 0
    assert any("absent" in warning and "disk" in warning for warning in found.warnings)
    profile = to_profile(found, "cpu")
    assert not profile.is_measured
    assert "direct disk reads not measured" in profile.note
    assert profile.copy_bytes_per_s == DEFAULT_PROFILE.copy_bytes_per_s
    assert to_profile(found, "emulated").is_measured


def refuse(
    monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[int], bool], error_number: int
) -> None:
    real_open = os.open

    def open_or_refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if is_refused(flags):
            raise OSError(error_number, os.strerror(error_number), str(path))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_or_refuse)


def test_unwritable_directory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, lambda flags: bool(flags & os.O_CREAT), errno.EROFS)
    found = measure(tmp_path)
    assert found.disk_reads == ()
    assert any(os.strerror(errno.EROFS) in warning for warning in found.warnings)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="nothing to refuse here")
@pytest.mark.parametrize("error_number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_refused_direct_reads_are_a_warning(
    error_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, lambda flags: bool(flags & os.O_DIRECT), error_number)
    found = measure(tmp_path)
    assert [read.method for read in found.disk_reads] == ["buffered"] * len(QUEUE_DEPTHS)
    assert any("O_DIRECT" in warning for warning in found.warnings)
    profile = to_profile(found, "cpu")
    assert profile.disk_method == "buffered" and profile.is_measured
    assert profile.disk_direct_bytes_per_s <= profile.disk_buffered_bytes_per_s
    assert "direct disk reads not measured" in profile.note
    assert list(tmp_path.iterdir()) == []


def test_full_disk_measures_on_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.pwrite
    written: list[int] = []

    def write_a_part(descriptor: int, piece: memoryview, offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real_write(descriptor, piece[: 300 * 1024], offset))
        return written[0]

    monkeypatch.setattr(os, "pwrite", write_a_part)
    found = measure(tmp_path)
    assert found.scratch_bytes == 300 * 1024
    assert found.disk_reads
    assert any(os.strerror(errno.ENOSPC) in warning for warning in found.warnings)


@pytest.mark.parametrize("max_scratch_bytes", [0, 50_000])
def test_no_room_for_two_experts_is_a_warning(max_scratch_bytes: int, tmp_path: Path) -> None:
    found = measure(tmp_path, effort=replace(TINY, max_scratch_bytes=max_scratch_bytes))
    assert found.disk_reads == ()
    assert any("two experts" in warning for warning in found.warnings)


def test_scratch_takes_at_most_a_quarter_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=MIB))
    assert 0 < measure(tmp_path).scratch_bytes <= MIB // 4


def test_read_errors_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_reads = disk_speed._disk_reads

    def cut_first(descriptor: int, *rest: Any) -> Any:
        os.ftruncate(descriptor, 0)
        return real_reads(descriptor, *rest)

    monkeypatch.setattr(disk_speed, "_disk_reads", cut_first)
    found = measure(tmp_path)
    assert found.disk_reads == ()
    assert sum("reads not measured" in warning for warning in found.warnings) == 2


@pytest.mark.parametrize("function", ["ftruncate", "pwrite", "fsync"])
def test_ctrl_c_while_writing_leaves_nothing(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open = psutil.Process().num_fds()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().num_fds() == num_open


def test_ctrl_c_while_reading_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open, threads = psutil.Process().num_fds(), set(threading.enumerate())
    real_read = DiskExpertStore.read_into
    reads = itertools.count()

    def read_and_interrupt(*arguments: Any) -> None:
        if next(reads) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        real_read(*arguments)

    monkeypatch.setattr(DiskExpertStore, "read_into", read_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().num_fds() == num_open
    assert set(threading.enumerate()) <= threads


def test_scratch_file_has_no_name_while_it_is_filled_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sync = os.fsync
    seen: list[list[Path]] = []

    def look(descriptor: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    measure(tmp_path)
    assert seen and not any(seen)


def test_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler._Load, "busy_cores", lambda self: float(os.cpu_count() or 1))
    found = measure(tmp_path)
    assert found.is_disturbed
    assert any("measure again when it is idle" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("times", "is_uneven"),
    [
        ([0.100, 0.101, 0.150], False),
        ([1e-4, 3e-4, 5e-4], False),
        ([1e-4, 1e-4, 8e-3], False),
        ([2e-4, 8e-3, 8e-3], True),
    ],
    ids=["steady", "short", "one late", "quantum"],
)
def test_quantum_shaped_times_are_noticed(times: list[float], is_uneven: bool) -> None:
    assert profiler._is_uneven(times) == is_uneven


def test_uneven_expert_times_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_is_uneven", lambda times: True)
    warnings = [text for text in measure(tmp_path).warnings if "threads waited" in text]
    assert len(warnings) == 2
    assert "1, 2, 4, 8, 16, 32, 64 rows" in warnings[0]


def test_directory_in_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = psutil.disk_partitions(all=True)[0]
    mounts = [
        root._replace(mountpoint="/", fstype="ext4"),
        root._replace(mountpoint=str(tmp_path.resolve()), fstype="tmpfs"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    warnings: list[str] = []
    disk_speed._warn_if_in_memory(tmp_path, warnings)
    assert len(warnings) == 1 and "tmpfs" in warnings[0]
    disk_speed._warn_if_in_memory(tmp_path.parent, warnings)
    assert len(warnings) == 1


# Profiles of handmade measurements


def exactly(value: float) -> Figure:
    return Figure(value, value, value, 3)


def disk_read(method: str, depth: int, rate: float, tiny_s: float = 0.0) -> DiskRead:
    return DiskRead(method, depth, exactly(rate), exactly(tiny_s))


def handmade(**changes: Any) -> Measurements:
    values = Measurements(
        device="cpu",
        hidden_size=2048,
        intermediate_size=512,
        dtype="bfloat16",
        expert_bytes=6_000_000,
        num_threads=2,
        is_quick=True,
        working_set_bytes=2**28,
        memory_copy_bytes_per_s=exactly(1e10),
        memory_copy_threads=2,
        memory_read_bytes_per_s=exactly(2e10),
        memory_read_threads=2,
        matrix_flops_per_s=exactly(1e12),
        matrix_size=1024,
        expert_times=tuple(
            ExpertTime(n, exactly(4e-4 + 2e-5 * n if n <= 16 else 1.0)) for n in EXPERT_ROWS
        ),
        expert_copy_s=exactly(1e-3),
        scratch_bytes=2**27,
        disk_reads=(
            disk_read("direct", 1, 1.0e9),
            disk_read("direct", 4, 2.0e9, 1e-3),
            disk_read("direct", 8, 2.05e9),
            disk_read("buffered", 4, 1.5e9),
        ),
        is_disturbed=False,
        machine={"usable_cores": 2},
        warnings=(),
    )
    return replace(values, **changes)


def test_cpu_profile_by_hand() -> None:
    found = handmade()
    profile = to_profile(found, "cpu")
    assert profile.name == "this-machine (2 cores)"
    assert (profile.disk_method, profile.disk_queue_depth) == ("direct", 4)
    assert profile.disk_direct_bytes_per_s == 2.05e9
    assert profile.disk_buffered_bytes_per_s == 1.5e9
    assert profile.mean_tokens_per_miss == 2.0
    assert profile.is_measured and profile.note == ""
    costs = CostModel.from_profile(profile, found.expert_bytes)
    assert costs.transfer_s == pytest.approx(found.expert_bytes / 2.0e9)
    assert profile.copy_latency_s == 1e-3
    assert costs.cpu_base_s == pytest.approx(4e-4)
    assert costs.cpu_token_s == pytest.approx(2e-5)


def test_emulated_profile_by_hand() -> None:
    profile = to_profile(handmade(), "emulated", mean_tokens_per_miss=3.5)
    assert profile.copy_bytes_per_s == pytest.approx(6e9) and profile.copy_latency_s == 0
    assert profile.mean_tokens_per_miss == 3.5
    assert "emulated" in profile.name and profile.is_measured


def test_disturbed_measurement_takes_the_fastest_times_and_says_so() -> None:
    times = tuple(ExpertTime(n, Figure(1e-2, 4e-4, 2e-2, 9)) for n in EXPERT_ROWS)
    profile = to_profile(handmade(expert_times=times, is_disturbed=True), "cpu")
    assert CostModel.from_profile(profile, 6_000_000).cpu_s(2) == pytest.approx(4e-4, rel=0.02)
    assert "busy" in profile.note


def test_tiny_reads_never_explain_more_than_half() -> None:
    reads = (disk_read("buffered", 1, 1e9, tiny_s=1.0),)
    profile = to_profile(handmade(disk_reads=reads), "cpu")
    assert profile.copy_latency_s == pytest.approx(3e-3)
    assert CostModel.from_profile(profile, 6_000_000).transfer_s == pytest.approx(6e-3)


def test_profile_holds_what_predictions_need() -> None:
    products = (
        ProductTime("cpu", "expert", "bfloat16", 4, 6_000_000, Figure(3e-4, 2e-4, 9e-4, 9)),
        ProductTime("cpu", "dense", "float32", 8, 8_000_000, exactly(1e-3)),
    )
    machine = {"usable_cores": 2, "memory_limit_bytes": None, "memory_total_bytes": 2**34}
    found = handmade(products=products, machine=machine)
    profile = to_profile(found, "cpu", layer_overhead_s=1e-4, load_overhead_s=2e-5)
    assert profile.memory_read_bytes_per_s == 2e10 and profile.matrix_flops_per_s == 1e12
    assert (profile.layer_overhead_s, profile.load_overhead_s) == (1e-4, 2e-5)
    assert profile.ram_bytes == 2**34 and profile.gpu_memory_bytes is None
    rates = {(rate.operation, rate.num_rows): rate.bytes_per_s for rate in profile.weight_rates}
    assert rates == {("expert", 4): pytest.approx(2e10), ("dense", 8): pytest.approx(8e9)}
    assert not profile.is_disturbed
    crowded = to_profile(replace(found, is_disturbed=True), "cpu")
    assert crowded.is_disturbed
    assert crowded.weight_rates[0].bytes_per_s == pytest.approx(3e10)


def handmade_gpu() -> GpuMeasurements:
    def expert(rows: int) -> ProductTime:
        seconds = exactly(1e-5 + 1e-7 * rows)
        return ProductTime("cuda", "expert", "bfloat16", rows, 6_000_000, seconds)

    copies = [
        CopyTime("ram", "gpu", is_pinned, size, exactly(2e-5 + size / rate))
        for is_pinned, rate in ((True, 2.5e10), (False, 1e10))
        for size in (1_500_000, 6_000_000, 24_000_000)
    ]
    return GpuMeasurements(
        name="made up",
        memory_bytes=16 * 2**30,
        memory_read_bytes_per_s=exactly(1e12),
        matrix_flops_per_s=exactly(1e14),
        round_trip_s=exactly(3e-5),
        products=tuple(map(expert, EXPERT_ROWS)),
        copies=tuple(copies),
    )


def test_cuda_profile_by_hand() -> None:
    profile = to_profile(handmade(gpu=handmade_gpu()), "cuda")
    assert "made up" in profile.name and profile.is_measured and profile.has_cpu_experts
    assert profile.copy_bytes_per_s == pytest.approx(2.5e10)
    assert profile.copy_latency_s == pytest.approx(2e-5)
    assert profile.device_weight_bytes_per_s == pytest.approx(6e11)
    assert profile.device_token_weight_bytes_per_s == pytest.approx(6e13)
    assert profile.activation_round_trip_s == 3e-5
    assert profile.gpu_memory_bytes == 16 * 2**30
    assert {rate.place for rate in profile.weight_rates} == {"cuda"}
    # The CPU's own numbers stay.
    assert profile.cpu_weight_bytes_per_s == to_profile(handmade(), "cpu").cpu_weight_bytes_per_s


def test_cuda_profile_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="no GPU was measured"):
        to_profile(handmade(), "cuda")


def test_gpu_measurements_run_where_there_is_none() -> None:
    """On the CPU in the GPU's place: every line but those about pinned memory and streams."""
    layout = ExpertLayout(64, 48, torch.bfloat16)
    found = measure_gpu(torch.device("cpu"), layout, TINY)
    for figure in (found.memory_read_bytes_per_s, found.matrix_flops_per_s, found.round_trip_s):
        check_figure(figure)
    rows = [product.num_rows for product in found.products]
    assert rows == [*EXPERT_ROWS, *DENSE_ROWS]
    assert {product.place for product in found.products} == {"cuda"}
    assert [(copy.is_pinned, copy.num_bytes) for copy in found.copies] == [
        (False, int(share * layout.slot_bytes)) for share in COPY_SHARES
    ]
    profile = to_profile(handmade(gpu=found), "cuda")
    assert profile.copy_bytes_per_s > 0


def test_a_gpu_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of luck\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("oled_moe.machine._gpus", list)
    monkeypatch.setattr(profiler, "measure_gpu", fail)
    found = measure(tmp_path)
    assert found.gpu is None
    assert "the GPU was not measured: CUDA error: out of luck" in found.warnings


def test_full_measurements_read_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FULL.min_working_set_bytes == 4 * 2**30 <= FULL.max_working_set_bytes
    monkeypatch.setattr(profiler, "usable_memory_bytes", lambda **_: 16 * MIB)
    warnings: list[str] = []
    effort = replace(TINY, max_working_set_bytes=8 * MIB, min_working_set_bytes=8 * MIB)
    arena = profiler._fill_arena(ExpertLayout(64, 48, torch.float32), effort, None, warnings)
    assert arena.numel() <= 4 * MIB and "no more was free" in warnings[0]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device"):
        to_profile(handmade(), "cuda")
    with pytest.raises(ConfigError, match="device"):
        default_profile_path("../cuda")


def test_best_disk_read_prefers_few_threads_of_equal_speed() -> None:
    reads = [disk_read("direct", 8, 1.0e9), disk_read("direct", 2, 0.97e9)]
    assert best_disk_read(reads) is reads[1]
    assert best_disk_read([reads[0], disk_read("direct", 2, 0.9e9)]) is reads[0]
    assert best_disk_read([]) is None


def test_best_disk_read_takes_the_page_cache_only_where_it_is_faster_by_far() -> None:
    direct = disk_read("direct", 4, 1.0e9)
    assert best_disk_read([direct, disk_read("buffered", 1, 1.4e9)]) is direct
    buffered = disk_read("buffered", 1, 1.6e9)
    assert best_disk_read([direct, buffered]) is buffered
    assert best_disk_read([buffered]) is buffered


ROWS = [1.0, 2.0, 4.0, 8.0, 16.0]
times_s = st.floats(min_value=1e-6, max_value=10.0)


@given(base_s=times_s, share=st.floats(min_value=0.02, max_value=10.0))
def test_fit_recovers_an_affine_law(base_s: float, share: float) -> None:
    row_s = share * base_s
    fitted = fit_affine(ROWS, [base_s + row_s * n for n in ROWS])
    if base_s > 0.02 * (base_s + row_s * sum(ROWS) / len(ROWS)):
        assert fitted == pytest.approx((base_s, row_s), rel=1e-6)


@given(st.lists(times_s, min_size=5, max_size=5))
def test_fit_is_positive_and_within_reason(seconds: list[float]) -> None:
    base_s, row_s = fit_affine(ROWS, seconds)
    assert base_s > 0 and row_s > 0
    assert base_s + row_s <= 2 * max(seconds)


# Files


def test_default_profile_path() -> None:
    path = default_profile_path("cpu")
    assert path == Path.home() / ".cache" / "oled-moe" / "hardware-cpu.json"
    folder = Path("elsewhere")
    assert default_profile_path("emulated", cache_directory=folder).parent == folder


def test_save_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hardware.json"
    save_profile(DEFAULT_PROFILE, path)
    save_profile(replace(DEFAULT_PROFILE, name="second"), path)
    assert load_profile(path).name == "second"

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OledMoeError, match=r"hardware\.json"):
        save_profile(DEFAULT_PROFILE, path)
    assert load_profile(path).name == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_save_under_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OledMoeError, match="cannot be written"):
        save_profile(DEFAULT_PROFILE, tmp_path / "file" / "hardware.json")


class CpuTimes(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float
    guest: float


def test_load_counts_other_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([0.0, 2.0])
    totals = iter([CpuTimes(10, 1, 50, 5, 3), CpuTimes(13, 2, 55, 9, 6)])
    own = iter([1.0, 2.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(totals))
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clocks))
    load = profiler._Load()
    busy_cores = load.busy_cores()
    monkeypatch.undo()
    assert busy_cores == 1.5
