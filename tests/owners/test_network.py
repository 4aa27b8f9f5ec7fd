"""Owners at addresses: who is let in, what a lost connection costs, the commands."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import pymc_dp as dp
from pymc_dp.__main__ import main
from pymc_dp.base import compat as _compat
from pymc_dp.owners.messages import unpacked
from pymc_dp.owners.teller import Teller
from tests.owners.common import MARKS

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")
network = pytest.importorskip("pymc_dp.owners.network")

pytestmark = MARKS

STUDY = """
    import pymc as pm

    columns = {"x": ("float64", 2), "y": "int64"}

    def build(x, y):
        with pm.Model() as model:
            b = pm.Normal("b", 0.0, 2.0, shape=2)
            pm.Bernoulli("y", logit_p=pm.Data("x", x) @ b, observed=y)
        return model
"""
OWNER = """
    import sys
    from pathlib import Path

    import numpy as np
    import pymc_dp as dp

    here = Path(__file__).parent
    rng = np.random.default_rng({k})
    x = rng.normal(size=(200, 2))
    y = (rng.random(200) < 1.0 / (1.0 + np.exp(-x @ [0.8, -0.5]))).astype(int)
    data, ledger = dict(x=x, y=y), here / "ledger{k}"
    owner = dp.Owner(here / "study.py", data, 2.0, 1e-6, ledger=ledger, dataset="hospital {k}")
"""


def study(folder: Path, text: str = STUDY) -> Path:
    path = folder / "study.py"
    path.write_text(textwrap.dedent(text))
    return path


def owner(folder: Path, k: int, epsilon: float = 2.0, n: int = 200, **budget: Any) -> dp.Owner:
    rng = np.random.default_rng(k)
    x = rng.normal(size=(n, 2))
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ [0.8, -0.5]))).astype(int)
    given = {"dataset": f"hospital {k}", **budget}
    return dp.Owner(folder / "study.py", {"x": x, "y": y}, epsilon, 1e-6, **given)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str], list[Any]]]:
    """A folder with a model file and certificates, addresses of two owners, and their budgets."""
    folder = tmp_path_factory.mktemp("study")
    study(folder)
    network.make_certificates(folder / "certificates", ["localhost"])
    addresses, servers, budgets = [], [], []
    for k in range(2):
        one = owner(folder, k, neighboring="replace_one")
        teller = Teller(one.model, one.model_hash)
        certificates = folder / "certificates" / "localhost"
        server, port = network.start_server(teller, "localhost:0", certificates)
        addresses.append(f"localhost:{port}")
        servers.append(server)
        budgets.append(one.budget)
    yield folder, addresses, budgets
    for server in servers:
        server.stop(None)


def by_hand(model: pm.Model, draws: int = 10, chains: int = 2) -> Any:
    return dp.DPLangevin(
        draws=draws,
        chains=chains,
        clip_norm=1.0,
        scaling=0.3,
        step_size=0.2,
        n_steps=2,
        energy_clip=0.5,
        noise_multiplier=500.0,
        model=model,
        progressbar=False,
    )


# -- who is let in --------------------------------------------------------------------------------


def test_chains_in_processes_ask_together(served: tuple[Path, list[str], list[Any]]) -> None:
    folder, addresses, _ = served
    owners = dp.Owners(
        addresses,
        model_file=folder / "study.py",
        certificates=folder / "certificates" / "analyst",
    )
    rounds: list[int] = []
    ask = owners._study._ask_together

    def counting(plan_id: int, questions: Any) -> Any:
        rounds.append(len(questions))
        return ask(plan_id, questions)

    owners._study._ask_together = counting
    step = by_hand(owners.model, draws=20, chains=3)
    found = dp.sample(
        20, chains=3, cores=3, step=step, model=owners.model, progressbar=False, random_seed=1
    )
    assert _compat.group(found, "posterior")["b"].shape == (3, 20, 2)
    assert sum(rounds) == 3 * 20 * 3
    assert np.mean(np.array(rounds) == 3) > 0.5  # chains begin one after the other


@pytest.mark.parametrize("who", ["stranger", "nobody"])
def test_strangers_are_not_answered(
    served: tuple[Path, list[str], list[Any]], who: str, tmp_path: Path
) -> None:
    folder, addresses, budgets = served
    before = [budget.spent().gdp_mu2 for budget in budgets]
    certificates = None
    if who == "stranger":  # of another study
        certificates, *_ = network.make_certificates(tmp_path / "other", ["localhost"])
    with pytest.raises(dp.OwnerUnavailable, match="certificates of the same study"):
        dp.Owners(
            addresses, model_file=folder / "study.py", certificates=certificates, patience=0.5
        )
    assert [budget.spent().gdp_mu2 for budget in budgets] == before


def test_an_owner_with_another_certificate_is_not_believed(
    served: tuple[Path, list[str], list[Any]], tmp_path: Path
) -> None:
    folder, addresses, _ = served
    study(tmp_path)
    other = owner(tmp_path, 5)
    _, false = network.make_certificates(tmp_path / "other", ["localhost"])
    server, port = network.start_server(Teller(other.model), "localhost:0", false)
    with pytest.raises(dp.OwnerUnavailable):
        dp.Owners(
            [addresses[0], f"localhost:{port}"],
            model_file=folder / "study.py",
            certificates=folder / "certificates" / "analyst",
            patience=0.5,
        )
    server.stop(None)
    assert other.budget.spent().epsilon == 0.0


def test_an_owner_is_no_analyst(served: tuple[Path, list[str], list[Any]]) -> None:
    folder, addresses, budgets = served
    before = [budget.spent().gdp_mu2 for budget in budgets]
    with pytest.raises(dp.OwnerUnavailable):
        dp.Owners(
            addresses,
            model_file=folder / "study.py",
            certificates=folder / "certificates" / "localhost",
            patience=0.5,
        )
    assert [budget.spent().gdp_mu2 for budget in budgets] == before


def test_a_message_that_is_too_large_is_not_sent_again(
    served: tuple[Path, list[str], list[Any]],
) -> None:
    folder, addresses, _ = served
    channel = network.There(addresses[0], folder / "certificates" / "analyst", 60.0)
    begin = time.monotonic()
    with pytest.raises(dp.PrivacyError, match="is larger than 34 MB"):
        channel.call("describe", b" " * 2**26)()
    assert time.monotonic() - begin < 10.0


def test_two_servers_do_not_share_a_port(served: tuple[Path, list[str], list[Any]]) -> None:
    folder, addresses, _ = served
    teller = Teller(owner(folder, 7).model)
    with pytest.raises(ValueError, match="Is it in use"):
        network.start_server(teller, addresses[0], folder / "certificates" / "localhost")


def test_another_model_file_is_refused(
    served: tuple[Path, list[str], list[Any]], tmp_path: Path
) -> None:
    folder, addresses, budgets = served
    before = [budget.spent().gdp_mu2 for budget in budgets]
    path = study(tmp_path, STUDY.replace("0.0, 2.0", "0.0, 2.5"))
    with pytest.raises(dp.UnsafeModel, match="The model file of hospital 0 is not yours"):
        dp.Owners(addresses, model_file=path, certificates=folder / "certificates" / "analyst")
    assert [budget.spent().gdp_mu2 for budget in budgets] == before


def test_without_certificates_only_this_machine_is_served(
    served: tuple[Path, list[str], list[Any]],
) -> None:
    folder, _, _ = served
    teller = Teller(owner(folder, 0).model)
    for address in ("0.0.0.0:0", "example.org:5000", "[::]:0"):
        with pytest.raises(ValueError, match=r"needs certificates"):
            network.start_server(teller, address)
        with pytest.raises(ValueError, match=r"needs certificates"):
            network.There(address, None, 1.0)
    with pytest.raises(ValueError, match=r"lacks ca.pem, certificate.pem, key.pem"):
        network.start_server(teller, "0.0.0.0:0", folder)


def test_an_address_where_nobody_is(served: tuple[Path, list[str], list[Any]]) -> None:
    folder, _, _ = served
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with pytest.raises(dp.OwnerUnavailable, match=rf"{address}\) does not answer"):
        dp.Owners([address, address], model_file=folder / "study.py", patience=0.5)


# -- model files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("columns = {}\nbuild = dict", "must define `columns`"),
        ("columns = {'x': 'float64'}", "must define `columns`"),
        ("columns = {'x': 'text'}\nbuild = dict", r"columns\['x'\] must be a type"),
        ("columns = {'x': ('float64', 0)}\nbuild = dict", r"columns\['x'\] must be a type"),
        ("columns = {'x': 'float64'}\nbuild = dict", "must return a PyMC model, not dict"),
    ],
)
def test_files_that_make_no_model(tmp_path: Path, text: str, words: str) -> None:
    path = study(tmp_path, text)
    with pytest.raises(ValueError, match=words):
        dp.Owner(path, {"x": np.zeros(20)}, 1.0, 1e-6)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"x": np.zeros((20, 2))}, "data has no 'y'"),
        ({"x": np.zeros((20, 3)), "y": np.zeros(20, int)}, "with 2 columns"),
        ({"x": np.zeros((20, 2)), "y": np.zeros(20)}, "must hold integers"),
        ({"x": np.zeros((20, 2)), "y": np.zeros(19, int)}, "differ in their number of rows"),
    ],
)
def test_data_that_are_not_those_declared(
    tmp_path: Path, data: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        dp.Owner(study(tmp_path), data, 1.0, 1e-6)


def test_the_model_file_sees_no_record(tmp_path: Path) -> None:
    """What it computes while it builds is of made-up rows, and so the same for all owners."""
    text = STUDY.replace('"b", 0.0, 2.0', '"b", float(x[0, 0]), float(y.mean())')
    study(tmp_path, text)
    tellers = [Teller(owner(tmp_path, k).model) for k in range(2)]
    facts = [unpacked(teller.handle("describe", b"{}"))["found"] for teller in tellers]
    assert facts[0]["structure"] == facts[1]["structure"]
    assert len(facts[0]["structure"]["densities"]) == 6


@pytest.mark.parametrize(
    "computed", ["(x - x.mean(0)) / x.std(0)", "np.sort(x, axis=0)", "np.repeat(x[:1], len(x), 0)"]
)
def test_rows_that_are_computed_of_others_are_refused(tmp_path: Path, computed: str) -> None:
    text = "import numpy as np\n" + textwrap.dedent(STUDY).replace('Data("x", x)', 'Data("x", z)')
    study(tmp_path, text.replace("with pm", f"z = {computed}\n    with pm"))
    with pytest.raises(dp.UnsafeModel, match="is not made of the arrays of `columns`"):
        Teller(owner(tmp_path, 0).model)


def test_bad_records_are_refused_before_an_owner_serves(tmp_path: Path) -> None:
    study(tmp_path)
    x, y = np.zeros((200, 2)), np.zeros(200, int)
    x[17, 1] = np.nan
    with pytest.raises(dp.UnsafeModel, match=r"column 1 of `x` holds NaN"):
        Teller(dp.Owner(tmp_path / "study.py", {"x": x, "y": y}, 2.0, 1e-6).model)


def test_units_of_an_owner(tmp_path: Path) -> None:
    study(tmp_path)
    one = owner(tmp_path, 0, privacy_unit=np.arange(200) // 4)
    assert (one.budget.n_public, one.budget.unit) == (50, "unit (all rows with one id)")
    named = owner(tmp_path, 0, privacy_unit=pd.Series(np.arange(200) // 4).astype(str))
    assert named.budget.n_public == 50
    wrong = {"one id for each row": np.arange(199), "integers or text": np.zeros(200)}
    for message, bad in {**wrong, "one vector of ids": np.zeros((200, 1), int)}.items():
        with pytest.raises(ValueError, match=message):
            owner(tmp_path, 0, privacy_unit=bad)


def test_a_restart_with_something_else_has_no_second_budget(tmp_path: Path) -> None:
    study(tmp_path)
    ledger = tmp_path / "ledger"
    first = owner(tmp_path, 0, ledger=ledger)
    assert owner(tmp_path, 0, ledger=ledger).budget.account.number == first.budget.account.number
    for other in ({"dataset": "hospital B"}, {"n": 201}, {"epsilon": 2.01}):
        with pytest.raises(dp.BudgetExceeded, match="overall cap"):
            owner(tmp_path, 0, ledger=ledger, **other)


# -- commands -------------------------------------------------------------------------------------


def test_certificates_are_for_their_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certificates"
    assert main(["certificates", str(folder), "localhost", "127.0.0.1"]) == 0
    assert "For tests." in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["127.0.0.1", "analyst", "localhost"]
    for file in folder.rglob("*.pem"):
        assert file.stat().st_mode & 0o077 == 0
    assert main(["certificates", str(folder), "localhost"]) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert main(["certificates", str(tmp_path / "other"), "analyst"]) == 1


def test_files_that_make_no_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "nothing.py")]) == 1
    assert "There is no file" in capsys.readouterr().err
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1")
    assert main(["serve", str(empty)]) == 1
    assert "must make one dp.Owner" in capsys.readouterr().err
    study(tmp_path)
    forgetful = textwrap.dedent(OWNER.format(k=0)).replace("ledger=ledger, ", "")
    (tmp_path / "forgetful.py").write_text(forgetful)
    assert main(["serve", str(tmp_path / "forgetful.py")]) == 1
    assert "gives dp.Owner no ledger" in capsys.readouterr().err


def started(folder: Path, k: int, port: int) -> subprocess.Popen[str]:
    """A process that serves an owner, once it does."""
    path = folder / f"owner{k}.py"
    path.write_text(textwrap.dedent(OWNER.format(k=k)))
    command = [sys.executable, "-m", "pymc_dp", "serve", str(path), "--listen", f"localhost:{port}"]
    command += ["--certificates", str(folder / "certificates" / "localhost")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"Serving hospital {k} on localhost:{port}")
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@contextmanager
def two_hospitals(folder: Path, **settings: Any) -> Iterator[tuple[dp.Owners, list[Any], Any]]:
    """The analyst's side, the processes of two owners, and what starts one again."""
    study(folder)
    network.make_certificates(folder / "certificates", ["localhost"])
    ports = [free_port(), free_port()]
    processes = [started(folder, k, port) for k, port in enumerate(ports)]

    def again(k: int) -> None:
        processes[k] = started(folder, k, ports[k])

    try:
        owners = dp.Owners(
            [f"localhost:{port}" for port in ports],
            model_file=folder / "study.py",
            certificates=folder / "certificates" / "analyst",
            **settings,
        )
        yield owners, processes, again
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_an_owner_that_is_killed_and_started_again(tmp_path: Path) -> None:
    killed = 0
    with two_hospitals(tmp_path) as (owners, processes, again):
        step = by_hand(owners.model, draws=400, chains=2)
        done = threading.Event()

        def kill() -> None:
            nonlocal killed
            while not done.wait(1.0) and killed < 4:
                k = killed % 2
                processes[k].send_signal(signal.SIGKILL)
                processes[k].wait()
                killed += 1
                again(k)

        killer = threading.Thread(target=kill)
        killer.start()
        found = dp.sample(400, chains=2, cores=2, step=step, model=owners.model, progressbar=False)
        done.set()
        killer.join()
        assert killed >= 1
        assert _compat.group(found, "posterior")["b"].shape == (2, 400, 2)
        for owner in owners._study.owners:  # each plan was charged once
            spent = owner.facts["spent"]
            assert 0.0 < spent < 2.0
        spent = {owner.facts["spent"] for owner in owners._study.owners}
        assert max(spent) - min(spent) < 1e-9


@pytest.mark.slow
def test_an_owner_that_does_not_come_back(tmp_path: Path) -> None:
    with two_hospitals(tmp_path, patience=2.0) as (owners, processes, _):
        step = by_hand(owners.model, draws=5000, chains=1)
        threading.Timer(3.0, processes[1].kill).start()
        begin = time.monotonic()
        with pytest.raises(dp.OwnerUnavailable, match="Draws made before are not lost") as caught:
            dp.sample(5000, chains=1, cores=1, step=step, model=owners.model, progressbar=False)
        assert time.monotonic() - begin < 60.0
        assert "Draws were made and are kept" in "".join(caught.value.__notes__)
        kept = dp.release(model=owners.model)
        assert 1 <= _compat.group(kept, "posterior")["b"].shape[1] < 5000
        assert "hospital 1:" in dp.privacy_statement(kept)
