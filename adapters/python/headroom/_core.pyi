from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

version: str

View = Union["Tensor", tuple[int, int, int, int], None]

class Tensor:
    dtype: str
    device: str
    read_only: bool
    def __len__(self) -> int: ...
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def frozen(self) -> Tensor: ...
    @staticmethod
    def from_buffer(array: Any, dtype: Optional[str]) -> Tensor: ...
    @staticmethod
    def from_capsule(capsule: Any) -> Tensor: ...
    @staticmethod
    def from_pointer(
        data: int, dtype: str, count: int, device: int, read_only: bool, owner: Any
    ) -> Tensor: ...

class OnOverflow:
    SKIP: OnOverflow
    THROW: OnOverflow

class ScalePolicy:
    dynamic: bool
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    first_growth_extra: int
    next_growth_extra: int
    hysteresis: int
    refill_on_growth: bool
    refill_on_clean: bool
    refill_on_shrink: bool
    tolerance: float
    late: bool
    stay_above_min: bool
    on_overflow: OnOverflow
    max_skips_in_row: int
    grad_limit: float
    peak_window: int
    retry_interval: int
    rerun: bool
    def __init__(self, **settings: Any) -> None: ...

class GradStats:
    count: int
    inf_count: int
    nan_count: int
    amax: float
    culprit: int
    culprit_inf: int
    culprit_nan: int
    finite: bool
    norm: float
    zeros: int
    subnormals: int
    histogram: dict[int, int]

class UnscaleResult:
    before: GradStats
    new_inf: int
    new_zeros: int
    ok: bool

class StepReport:
    pending: bool
    applied: bool
    skip: str
    scale: float
    grad_norm: float
    clip_factor: float
    stats: GradStats
    culprit: str
    steps: int
    skipped: int

class AlarmReport:
    alarm: str
    scale: float
    skips_in_row: int
    culprit: str

class Optimizer:
    def zero_grad(self, stream: int = 0) -> None: ...
    def rebind(self, parameters: Sequence[tuple[str, View, View]], stream: int) -> None: ...
    def set_grad(self, index: int, grad: View) -> None: ...

class FusedOptimizer(Optimizer):
    def __init__(self, master_weights: bool, stochastic_rounding: bool, seed: int) -> None: ...
    def add_group(
        self, parameters: Sequence[tuple[str, View, View]], options: dict[str, Any], stream: int
    ) -> int: ...
    def set_options(self, group: int, options: dict[str, Any]) -> None: ...
    def apply(self, multiplier: float, clear_grads: bool = False, stream: int = 0) -> None: ...
    def steps(self, index: int) -> int: ...
    def refresh_master(self, index: int, stream: int) -> None: ...
    def follow_weight(self, index: int, stream: int) -> None: ...
    def state(self) -> tuple[list[int], list[tuple[str, Tensor, int]]]: ...
    def load_state(
        self, steps: list[int], tensors: Sequence[tuple[str, View, int]], stream: int
    ) -> None: ...

class SGD(FusedOptimizer): ...
class Adam(FusedOptimizer): ...
class AdamW(FusedOptimizer): ...

class GradScaler:
    policy: ScalePolicy
    enabled: bool
    def __init__(
        self,
        policy: ScalePolicy,
        enabled: bool,
        device: int,
        on_alarm: Optional[Callable[[AlarmReport], None]],
        stream: int,
    ) -> None: ...
    def set_policy(self, policy: ScalePolicy) -> None: ...
    def get_scale(self) -> float: ...
    def run_again(self) -> bool: ...
    def scale(self, loss: float) -> float: ...
    def scale_into(self, loss: Tensor, scaled: Tensor, stream: int) -> None: ...
    def unscale_(self, optimizer: Optimizer, stream: int) -> UnscaleResult: ...
    def step(
        self,
        optimizer: Optimizer,
        max_norm: float,
        clear_grads: str,
        stream: int,
        outside_scale: int = 0,
        outside_found: int = 0,
        tell_skipped: int = 0,
    ) -> StepReport: ...
    def report(self) -> StepReport: ...
    def try_report(self) -> Optional[StepReport]: ...
    def update(self, new_scale: Optional[float], stream: int) -> None: ...
    def discard(self) -> None: ...
    def save(self) -> str: ...
    def load(self, json: str) -> None: ...

class Places:
    def __init__(self, api: Any, plain: list[type]) -> None: ...
    @staticmethod
    def same(a: list[Any], b: list[Any]) -> bool: ...
    def look(self, parameters: list[Any], versions: bool) -> tuple[bool, bool, list[int]]: ...
    def advance(self, parameters: list[int]) -> None: ...

def preset(name: str) -> ScalePolicy: ...
def presets() -> dict[str, str]: ...
def measure(grads: Sequence[View], detail: bool = False, stream: int = 0) -> GradStats: ...
def unscale_(grads: Sequence[View], inverse_scale: float, stream: int = 0) -> UnscaleResult: ...
def set_num_threads(threads: int) -> None: ...
def num_threads() -> int: ...
def simd_target() -> str: ...
def cuda_available() -> bool: ...
