"""Shared by all commands: the parser's one-line errors, exit codes, JSON output."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from sgt_ds.errors import SgtError, UserError, refusal, refused_by_system
from sgt_ds.terminal import take_any_text

Handler = Callable[[argparse.Namespace], int | None]


_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")
# Actions that forget what an earlier one of their kind gave.
_REPLACING = (argparse._StoreAction, argparse.BooleanOptionalAction)


class Parser(argparse.ArgumentParser):
    """argparse, but bad usage is one line on stderr and exit status 2, and no flag is shortened.

    An option that would lose what an earlier one gave is bad usage too.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._given: dict[str, argparse.Action] = {}

    def parse_known_args(self, *arguments: Any, **settings: Any) -> Any:
        self._given = {}
        return super().parse_known_args(*arguments, **settings)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._check_given_once(action)
        # An option that takes several words takes the overrides after it too.
        if action.option_strings and action.nargs == "+" and self.get_default("overrides") == []:
            for text in arg_strings:
                if _OVERRIDE.match(text):
                    message = f"'{text}' is an override; overrides go directly after RUN.yaml"
                    raise argparse.ArgumentError(action, message)
        return super()._get_values(action, arg_strings)

    def _check_given_once(self, action: argparse.Action) -> None:
        if not action.option_strings or not isinstance(action, _REPLACING):
            return
        earlier = self._given.get(action.dest)
        if earlier is action:
            raise argparse.ArgumentError(action, "is given twice; give it once")
        if earlier is not None:
            message = f"sets the same as {'/'.join(earlier.option_strings)}; give one of them"
            raise argparse.ArgumentError(action, message)
        self._given[action.dest] = action

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse's own, in Python 3.10 to 3.13, says nothing of what is near.
        if action.choices is not None and value not in action.choices:
            from sgt_ds.config import nearest

            known = [str(each) for each in action.choices]
            hint = f"{nearest(str(value), known)}; known: {', '.join(known)}"
            raise argparse.ArgumentError(action, f"'{value}' is unknown{hint}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Tells every default, once."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        untold = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if untold or "default" in text:
            return text
        if isinstance(default, list):
            default = " ".join(str(each) for each in default)
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


Flags = argparse._ActionsContainer  # a parser, or a group of its flags
Subparsers = argparse._SubParsersAction  # the type that add_subparsers returns


def add_command(
    commands: Subparsers[Parser], name: str, help_line: str, example: str, handler: Handler
) -> Parser:
    """Add a verb with its one-line help, an example at the end of `--help`, and its handler.

    A handler returns its exit status, or None for 0.
    """
    parser = commands.add_parser(
        name,
        help=help_line,
        description=help_line,
        epilog=f"example:\n  {example}",
        formatter_class=_Help,
    )
    parser.set_defaults(handler=handler, command=parser)
    return parser


def add_run(parser: Parser, help_line: str, *, optional: bool = False) -> None:
    """Add what a verb about a run takes: RUN.yaml and `key=value` overrides of it."""
    count = "?" if optional else None
    parser.add_argument("run", nargs=count, type=Path, metavar="RUN.yaml", help=help_line)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="overrides of RUN.yaml, as dotted keys",
    )


def add_group(commands: Subparsers[Parser], name: str, help_line: str) -> Subparsers[Parser]:
    """Add a noun whose verbs are commands of their own, as `data` in `sgt-ds data verify`."""
    group = commands.add_parser(name, help=help_line, description=help_line)
    return group.add_subparsers(
        dest=f"{name}_verb", required=True, metavar="COMMAND", parser_class=Parser
    )


def whole_number(lowest: int = 0, highest: int = 10**12) -> Callable[[str], int]:
    """The type of a flag that takes a whole number in a range, for `add_argument`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a whole number from {lowest} to {highest}"
            )
        return number

    return parse


def real_number(lowest: float, highest: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of a flag that takes a number in a range; `above`: the lowest itself is excluded."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not lowest <= number <= highest or (above and number == lowest):
            limits = (
                f"above {lowest:g}, at most {highest:g}"
                if above
                else f"from {lowest:g} to {highest:g}"
            )
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {limits}")
        return number

    return parse


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document), flush=True)


def warn(verb: str, warnings: Iterable[str]) -> None:
    """Tell each warning in a line on stderr."""
    for warning in warnings:
        print(f"sgt-ds {verb}: warning: {warning}", file=sys.stderr, flush=True)


def check_new(flag: str, path: Path) -> None:
    """See that nothing is lost where `flag` has `path` written.

    Pipes, devices and what stdout leads to are continued, and an empty file holds nothing.
    Raises: UserError where a file with contents is there.
    """
    try:
        found = path.stat()
    except OSError:  # not there, or whoever writes it says what is wrong
        return
    if stat.S_ISREG(found.st_mode) and found.st_size and not _is_output_of_ours(path, found):
        raise UserError(path, flag, f"exists already; give another {flag}, or remove it")


def _is_output_of_ours(path: Path, found: os.stat_result) -> bool:
    """Whether `path` is `/dev/stdout`, `/dev/fd/7` or the like, redirected to the file `found`."""
    if os.path.realpath(path.parent).startswith("/proc/"):
        return True
    for descriptor in (1, 2):
        with suppress(OSError):  # closed by who started this
            if os.path.samestat(found, os.fstat(descriptor)):
                return True
    return False


def keep_deepspeed_quiet() -> None:
    """For verbs that only read checkpoints: else DeepSpeed warns that it found no accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def chosen_device(name: str) -> str:
    """`cpu` or `cuda`, of a flag's `auto`, `cpu` or `cuda`. Raises: as `usable_device`."""
    from sgt_ds.inference import usable_device

    return usable_device(None if name == "auto" else name).type


class OutputError(SgtError):
    """What a command prints cannot be written: a full disk behind stdout."""


class _ReaderGone(BrokenPipeError):
    """Nobody reads stdout any more, as after `sgt-ds … | head`: no error of ours."""


class _Output:
    """stdout whose own faults can be told from those of other files and of sockets.

    Raises: OutputError, _ReaderGone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _refusals_told():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _refusals_told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _refusals_told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderGone(*error.args) from error
    except OSError as error:
        instead = "redirect it elsewhere"
        raise OutputError(f"stdout: {refusal(error, 'written', instead=instead)}") from error


def run_command(parser: Parser, arguments: Sequence[str] | None) -> int:
    """Parse, run the chosen handler, and turn every expected error into one line and a status."""
    take_any_text()
    options, rest = parser.parse_known_args(arguments)
    # Not for the handler, which may hand its options to another process: parsers can't be pickled.
    command: Parser = vars(options).pop("command", parser)
    # argparse takes positional arguments from one place only; overrides may also follow a flag.
    if any(text.startswith("-") or "=" not in text or "overrides" not in options for text in rest):
        from sgt_ds.config import nearest

        hint = nearest(rest[0].partition("=")[0], command._option_string_actions, cutoff=0.7)
        command.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        options.overrides += rest
    _check_overrides(command, getattr(options, "overrides", []))
    try:
        return _handled(options)
    except (_ReaderGone, OutputError) as error:
        if (failure := _before(error)) is not None:
            return _tell(parser, options, failure)
        if isinstance(error, OutputError):
            return _tell(parser, options, error)
        return 141
    except SgtError as error:
        return _tell(parser, options, error)
    except (OSError, RuntimeError) as error:
        refused = refused_by_system(error, lambda path: _field_of(path, options, command))
        if refused is None:
            raise
        return _tell(parser, options, refused)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130


def _check_overrides(command: Parser, overrides: Sequence[str]) -> None:
    """Exit with status 2 where an override replaces what an earlier one sets."""
    keys = [override.partition("=")[0] for override in overrides]
    for number, key in enumerate(keys):
        for earlier in keys[:number]:
            if earlier == key:
                command.error(f"override {key}: is given twice; give it once")
            if earlier.startswith(f"{key}."):
                command.error(f"override {key}: replaces {earlier}, given before; give one of them")


def _handled(options: argparse.Namespace) -> int:
    """The status of the chosen handler, once all that it printed is written.

    Raises: OutputError, _ReaderGone where only that failed; whatever the handler raises.
    """
    stdout = sys.stdout
    if stdout is None:  # closed by who started this
        return options.handler(options) or 0
    sys.stdout = cast("TextIO", _Output(stdout))
    try:
        status = options.handler(options) or 0
        sys.stdout.flush()
        return status
    finally:
        sys.stdout = stdout
        try:
            stdout.flush()
        except OSError:  # nor may Python try it again at exit, with a status of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def _before(error: BaseException) -> SgtError | None:
    """The failure that came before what could not be printed; None without one."""
    before = error.__context__
    while before is not None:
        if isinstance(before, SgtError) and not isinstance(before, OutputError):
            return before
        before = before.__context__
    return None


def _field_of(path: Path, options: argparse.Namespace, command: Parser) -> str | None:
    """The flag, or the key of the run, that gives `path` or a folder around it.

    None where it is known by its place on the command line alone.
    """
    nearest, field = 0, None
    for action in command._actions:
        given = getattr(options, action.dest, None)
        for value in given if isinstance(given, list) else [given]:
            around = Path(value) if isinstance(value, str | Path) else Path()
            if path.is_relative_to(around) and len(around.parts) > nearest:
                nearest, field = len(around.parts), next(iter(action.option_strings[-1:]), None)
    if nearest or getattr(options, "run", None) is None or "overrides" not in options:
        return field
    from sgt_ds.config import key_of_path

    return key_of_path(path, options.run, options.overrides)


def _tell(parser: Parser, options: argparse.Namespace, error: SgtError) -> int:
    """Print an error in one line. Returns its exit status."""
    if isinstance(error, UserError) and getattr(options, "overrides", None):
        from sgt_ds.config import at_fault

        error = at_fault(error, options.run, options.overrides)
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return error.exit_code
