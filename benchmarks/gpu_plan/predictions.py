"""What we expect of a device, written before the first run: a result outside its range shows that we do not understand
it.

The ranges are for an H200 (4.8 TB/s, 132 multiprocessors). They follow from the bytes that the kernels move and from
the compiled code; nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_plan.rows import Row


@dataclass(frozen=True)
class Prediction:
    """The expected range of a figure: `field` of the row `key`, divided by the same field of the row `per` if that is
    given."""

    key: str
    field: str
    low: float
    high: float
    reason: str
    per: str = ""

    def find_figure(self, rows: dict[str, Row]) -> float | None:
        """Return the figure; None if a row has not been measured."""
        values = [rows.get(key, {}).get(self.field) for key in (self.key, self.per) if key]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) < len(values):
            return None
        return numbers[0] / numbers[1] if self.per else numbers[0]

    def judge(self, rows: dict[str, Row]) -> str:
        """Return a line that compares the figure with its range."""
        figure = f"{self.key}: {self.field}{f' / that of {self.per}' if self.per else ''}"
        value = self.find_figure(rows)
        if value is None:
            return f"not measured  {figure} (expected {self.low:g} to {self.high:g})"
        verdict = "as expected " if self.low <= value <= self.high else "UNEXPECTED  "
        return f"{verdict}  {figure} is {value:.3g}, expected {self.low:g} to {self.high:g}: {self.reason}"


_FP32, _BF16 = "time 110M fp32 0.01", "time 110M bf16 0.01"
_DEFAULT, _SCALAR, _SERIAL = "variant default", "variant scalar loads", "variant one load ahead"
_SAMPLING = "variant no reuse"
_PACKING = "packing 110M"
PREDICTIONS = (
    Prediction(_FP32, "topk % of a read", 50, 85, "one pass with 16-byte loads; the rest reads 1.5% of the entries"),
    Prediction(_FP32, "compress_ % of 12 bytes", 60, 90, "one pass that reads 8 and writes 4 bytes per element"),
    Prediction(_FP32, "topk passes", 1, 1, "normal data needs no fallback"),
    Prediction(_FP32, "mstopk × torch", 10, 60, "torch makes about 35 passes, mstopk 2"),
    Prediction(_BF16, "topk ms", 0.5, 0.75, "half the bytes, the same work per element", per=_FP32),
    Prediction("time 0.82M fp32 0.01", "topk ms", 0.012, 0.05, "five launches of few blocks: latency"),
    Prediction(_DEFAULT, "topk ms", 0.6, 1.0, "16-byte loads need a quarter of the instructions", per=_SCALAR),
    Prediction(_DEFAULT, "half ms", 0.3, 0.9, "eight loads in flight in the passes of k > d/4", per=_SERIAL),
    Prediction(
        "variant cluster", "topk ms", 0.85, 1.3, "two launches less, but 8 blocks read the candidates", per=_DEFAULT
    ),
    Prediction("variant cluster", "small topk ms", 0.6, 1.0, "8,192 entries: launches are most of it", per=_DEFAULT),
    Prediction(
        _DEFAULT, "small topk again ms", 0.5, 0.95, "no block reads 8,192 scattered samples first", per=_SAMPLING
    ),
    Prediction(
        _DEFAULT, "topk again ms", 0.85, 1.02, "the sample is a tenth of it; a third more candidates", per=_SAMPLING
    ),
    Prediction(_PACKING, "sign_pack_ % of its bytes", 65, 105, "reads and writes an element once; 16 loads per thread"),
    Prediction(_PACKING, "quantised_pack_ 8 % of its bytes", 65, 105, "the same, with 2 loads of 16 bytes per thread"),
    Prediction(
        _PACKING,
        "quantised_unpack_add_ 8 8 nodes % of its bytes",
        50,
        100,
        "16 bytes per element, half of them in words",
    ),
    Prediction(
        _PACKING, "sign_unpack_add_ 8 nodes % of its bytes", 50, 100, "9 bytes per element, and 8 nodes' bits to unpack"
    ),
    Prediction("training step", "overhead %", -5, 25, "one rank: selection, and launches from Python"),
    Prediction("steps that the device skips", "host ms, device", 0.1, 3, "the host does not wait for the 5 ms of work"),
)


def judge_all(rows: dict[str, Row]) -> list[str]:
    """Return a line for each prediction."""
    return [prediction.judge(rows) for prediction in PREDICTIONS]
