"""Every kind of kernel gives eager's results under Triton's interpreter, on the CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from importlib import util

import pytest
from attention_cases import ADDED, ATTENTION
from cuda_cases import INTERPRETED
from matmul_cases import INTERPRETED_MATMULS
from memory_orders import ORDERS
from reduction_chains import CHAINS, PAIRS

pytestmark = [
    pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"),
    pytest.mark.xdist_group("triton_interpreter"),  # one worker runs the interpreting process, not each of them
]
HERE = pathlib.Path(__file__).parent
OF = 1 if os.environ.get("FUSER_TEST_ALL") else 4  # cases, of which one runs where each takes a second; on a GPU all do
SEEN = (*list(ATTENTION)[::OF], *list(ADDED)[::-OF], *ORDERS[:: min(OF, 2)])
# Left to `make sweeps`: they run no line of the package that the others do not.
LEFT = """
    attention/neighbours var_columns/passing norm_gradients depthwise/last attention/plain argmax/passing
    attention/remainders dropout attention/doubled order/8 sum_and_max/passing exact/e4m3fn/store
    column_sum/bf16/passing cumsum/columns float8/e5m2/to cumsum cummax/columns bool_masks/0 pool/average/last/4
    log_softmax/long shared/some mixed_dtypes/0 mean_var/special pool/largest/gradient long_norm/odd pool/offsets
    pair/5 exact/e5m2/store cummax/looped index_add order/4 dropout/all norm_gradients/summed index_put/sum
    log_softmax/long/17002 pair/63 pair/6 dropout/transposed mean_var/columns chain/1 pair/7 dropout/channels
    float8/e4m3fn/from exact/pool/bf16 pair/3 chain/4 exact/pool/last cumsum/middle order/10 chain/11 normal
    dropout/rows softmax/odd cumsum/chunks pair/2 chain/0 exact/pool/int pair/4 exact/signs/float64 chain/104
    pool/average/gradient cummax/rows dropout/odd scatter_add/outer chain/8 mean_var/columns/odd dropout/long
    index_add/scaled chain/3 cummax/uint8 pair/0 order/6 chain/9 pool/average/edges
""".split()
ALL = (*INTERPRETED, *INTERPRETED_MATMULS, *CHAINS, *PAIRS, *SEEN)
NAMES = ALL if OF == 1 else tuple(name for name in ALL if name not in LEFT)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    """By case, what the interpreting process says of it."""
    root = str(HERE.parent.parent)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([root, str(HERE)])}
    command = [sys.executable, str(HERE / "interpreted.py"), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_as_right_as_eager(name: str, verdicts: dict[str, str | None]) -> None:
    problem = verdicts[name]
    if problem is not None and problem.startswith("unsupported"):
        pytest.skip(problem)
    if problem is not None and "only 0-dimensional arrays can be converted to Python scalars" in problem:
        pytest.skip("the interpreter of this Triton does not run with this NumPy")
    assert problem is None, problem
