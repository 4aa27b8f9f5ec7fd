"""Commands: ``pymc_dp ledger``, ``pymc_dp serve`` and ``pymc_dp certificates``."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from pymc_dp.errors import PrivacyError


def _serve(args: argparse.Namespace) -> None:
    """Serve the owner that a file makes, until it is interrupted."""
    from pymc_dp.owners.network import start_server
    from pymc_dp.owners.study import Owner
    from pymc_dp.owners.teller import Teller

    if not args.file.is_file():
        raise ValueError(f"There is no file {str(args.file)!r}.")
    sys.path.insert(0, str(args.file.resolve().parent))
    found = runpy.run_path(str(args.file))
    owners = {id(value): value for value in found.values() if isinstance(value, Owner)}
    if len(owners) != 1:
        raise ValueError(
            f"{args.file.name} must make one dp.Owner and give it a name, and it has made "
            f"{len(owners) or 'none'}."
        )
    [owner] = owners.values()
    if owner.budget.ledger.is_temporary:
        raise ValueError(
            f"{args.file.name} gives dp.Owner no ledger, and what is spent would be forgotten when "
            "this stops. Give it a file, ledger=."
        )
    teller = Teller(owner.model, owner.model_hash)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    logging.getLogger("pymc_dp.owners").setLevel(logging.INFO)
    server, port = start_server(teller, args.listen, args.certificates)
    host = args.listen.rpartition(":")[0]
    name = owner.budget.dataset or "an owner without a name"
    print(f"Serving {name} on {host}:{port}, {owner.budget!r}.", flush=True)
    print("Stop with Ctrl-C; what was agreed and answered is kept in the ledger.", flush=True)
    try:
        server.wait_for_termination()
    except KeyboardInterrupt:
        server.stop(grace=5.0).wait()
        print("Stopped.")


def _certificates(args: argparse.Namespace) -> None:
    """Make certificates for a test."""
    from pymc_dp.owners.network import make_certificates

    for folder in make_certificates(args.folder, args.hosts, args.days):
        print(folder)
    print("For tests. In a study, let every party make its own key and an authority sign it.")


def _add_ledger(commands: argparse._SubParsersAction) -> None:
    from pymc_dp.reports import ledgers

    ledger = commands.add_parser("ledger", help="what a ledger holds, for who answers for the data")
    actions = ledger.add_subparsers(required=True, metavar="action")
    show = actions.add_parser("show", help="what was promised, spent, released and not ended")
    verify = actions.add_parser("verify", help="whether rows were altered")
    close = actions.add_parser("close", help="end an account, and free what it has not spent")
    export = actions.add_parser("export", help="all rows as CSV")
    for parser in (show, verify, close, export):
        parser.add_argument("file", type=Path, help="a ledger")
    verify.add_argument("--head", help="hash from a published statement")
    close.add_argument("account", type=int, help="its number")
    close.add_argument("--yes", action="store_true", help="do not ask")
    export.add_argument("--csv", type=Path, help="a new file; default: standard output")
    show.set_defaults(run=lambda args: ledgers.show(args.file))
    verify.set_defaults(run=lambda args: ledgers.verify(args.file, args.head))
    close.set_defaults(run=lambda args: ledgers.close(args.file, args.account, args.yes))
    export.set_defaults(run=lambda args: ledgers.export(args.file, args.csv))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="pymc_dp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    serve = commands.add_parser("serve", help="answer an analyst's questions about your records")
    serve.add_argument("file", type=Path, help="Python that makes one dp.Owner")
    serve.add_argument("--listen", default="localhost:5000", help="host and port")
    serve.add_argument("--certificates", type=Path, help="folder with ca, certificate and key")
    serve.set_defaults(run=_serve)
    make = commands.add_parser("certificates", help="make certificates for a test")
    make.add_argument("folder", type=Path)
    make.add_argument("hosts", nargs="+", help="names by which owners are reached")
    make.add_argument("--days", type=int, default=30)
    make.set_defaults(run=_certificates)
    _add_ledger(commands)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; nothing is left for Python to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PrivacyError, ValueError, ImportError, OSError) as error:
        print(f"pymc_dp: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
