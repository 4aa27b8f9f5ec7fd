"""Run the replication of a paper::

python -m replications                          # which there are
python -m replications dp_hmc_2021 --quick      # under four minutes
python -m replications hmc_ecs_2019 --json replications/results/hmc_ecs_2019.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.runs import quiet

#: A module of the same name has `run(quick)`, which gives a `Found`.
PAPERS = {
    "dp_hmc_2021": "Räisä, Koskela & Honkela (2021), Differentially Private HMC",
    "thesis_2021": "Räisä (2021), Differentially Private Markov Chain Monte Carlo (thesis)",
    "penalty_2017": "Yıldırım (2016), On the Use of Penalty MCMC for Differential Privacy",
    "hmc_ecs_2019": "Dang et al. (2019), HMC with Energy Conserving Subsampling",
    "gibbs_2022": "Ju et al. (2022), Data Augmentation MCMC from Privatized Data",
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="The tables and figures of a paper, with its numbers beside ours.",
        epilog="\n".join(f"{name:13s} {title}" for name, title in PAPERS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", choices=list(PAPERS), metavar="PAPER", nargs="?")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and records")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results")
    given = parser.parse_args()
    if given.paper is None:
        parser.print_help()
        return 2
    quiet()
    begin = time.perf_counter()
    found = importlib.import_module(f"replications.{given.paper}").run(given.quick)
    seconds = time.perf_counter() - begin
    print(PAPERS[given.paper])
    print(found.table().to_string(index=False, na_rep="", float_format="{:.3g}".format))
    print(f"{seconds:.0f} s")
    if given.json is not None:
        found.write(given.json, given.paper, {"quick": given.quick, "seconds": round(seconds)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
