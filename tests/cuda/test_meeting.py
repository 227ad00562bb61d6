"""Kernels whose programs wait for each other: for which rows they are, and on which devices. No GPU is needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import Case

from fuser.cuda import driver, fused_kernel, tiles


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("MEETING", True), ("MEETING_FROM", 32768), ("MEETING_ELEMENTS", 4096), ("MEETING_MOST", 16)):
        monkeypatch.setattr(tiles, name, value)


def names(f, *shapes, dtype=torch.float32):
    """The names of the kernels of a function of normal numbers."""
    case = Case("meeting", f, lambda i: tuple(i.normal(*s).to(dtype) for s in shapes))
    return [function.name for function in case.source(case.fake_args()).functions]


ROWS = {
    "softmax": (lambda x: torch.softmax(x, -1), (40, 40000), torch.float32, True),
    "16-bit": (lambda x: torch.softmax(x, -1), (40, 40000), torch.bfloat16, True),
    "norm": (lambda x: F.layer_norm(x, x.shape[1:]), (40, 65536), torch.float32, True),
    "short": (lambda x: torch.softmax(x, -1), (40, 30000), torch.float32, False),
    "too long": (lambda x: torch.softmax(x, -1), (40, 70000), torch.float32, False),
    "double": (lambda x: torch.softmax(x, -1), (40, 40000), torch.float64, False),
    "columns": (lambda x: torch.softmax(x, 0), (40000, 40), torch.float32, False),
    "read once": (lambda x: x.sum(-1) * 2, (400, 40000), torch.float32, False),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_read_more_than_once_are_shared(name):
    f, shape, dtype, expected = ROWS[name]
    assert any(driver.MEETS in n for n in names(f, shape, dtype=dtype)) is expected


def test_devices_with_few_multiprocessors_have_other_kernels(monkeypatch):
    case = Case("meeting", lambda x: torch.softmax(x, -1), lambda i: (i.normal(40, 40000),))
    source = case.source(case.fake_args())
    for enough, expected in ((True, True), (False, False)):
        monkeypatch.setattr(driver, "places_to_meet", lambda enough=enough: enough)
        made = fused_kernel._without_meetings(source)
        assert any(driver.MEETS in f.name for f in made.functions) is expected


@pytest.mark.parametrize("counts, enough", [((132,), True), ((132, 3), False), ((4, 5), True), ((), False)], ids=str)
def test_all_devices_need_places(monkeypatch, counts, enough):
    class Properties:
        def __init__(self, device):
            self.multi_processor_count = counts[device]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(counts))
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    assert driver.places_to_meet() is enough
