"""The `headrace` command: reads flags over the environment, starts one thing, and turns what users can mend into one line on stderr.

Everything heavy is imported inside the command that needs it, so that `headrace --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from shared.settings import Settings

app = typer.Typer(
    name="headrace",
    help="LLM inference for many tenants. Every option is also an environment variable, HEADRACE_<NAME>; a flag overrides it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="The models of this machine.", no_args_is_help=True)
app.add_typer(models, name="models")

Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, typer.Option(help="Port of the API.", show_default="8000")]
Model = Annotated[
    str | None,
    typer.Option(help="A catalogue name, a folder in Hugging Face layout, a GGUF file, or hf:org/name.", show_default="smollm2-135m"),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default="auto")]
NatsUrl = Annotated[str | None, typer.Option(help="A NATS server with JetStream.")]
RedisUrl = Annotated[str | None, typer.Option(help="A Valkey or Redis server.")]
StateDir = Annotated[Path | None, typer.Option(help="Where models, keys and logs are kept.", show_default="~/.local/share/headrace")]
MetricsPort = Annotated[int | None, typer.Option(help="Port of /metrics and /health; 0: any free one.", show_default="0")]
Pull = Annotated[bool, typer.Option("--pull", help="Fetch the model first when it is missing.")]


@app.command()
def up(
    model: Model = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes.", show_default="1")] = None,
    host: Host = None,
    port: Port = None,
    device: Device = None,
    nats_url: NatsUrl = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
) -> int:
    """Serve a model on this machine: NATS, Valkey, router, gateway and workers, until Ctrl-C."""
    from services.local.options import UpSettings
    from services.local.up import up as run

    return run(
        _settings(
            UpSettings,
            model=model,
            workers=workers,
            host=host,
            port=port,
            device=device,
            nats_url=nats_url,
            redis_url=redis_url,
            state_dir=state_dir,
        )
    )


@app.command()
def gateway(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    nats_url: NatsUrl = None,
    redis_url: RedisUrl = None,
    state_dir: StateDir = None,
    pull: Pull = False,
) -> int:
    """Run one gateway: the HTTP API."""
    from shared.settings import Settings

    settings = _settings(Settings, model=model, host=host, port=port, nats_url=nats_url, redis_url=redis_url, state_dir=state_dir)
    if pull:
        _find_or_fetch(settings)
    from services.gateway.app import run

    return run(settings)


@app.command()
def router(host: Host = None, nats_url: NatsUrl = None, metrics_port: MetricsPort = None) -> int:
    """Run one router: it advises gateways which worker to use."""
    from services.router.app import run
    from shared.settings import Settings

    return run(_settings(Settings, host=host, nats_url=nats_url, metrics_port=metrics_port))


@app.command()
def worker(
    model: Model = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0: all cores.", show_default="0")] = None,
    host: Host = None,
    nats_url: NatsUrl = None,
    metrics_port: MetricsPort = None,
    state_dir: StateDir = None,
    pull: Pull = False,
) -> int:
    """Run one worker: an engine with one copy of the model."""
    from shared.settings import Settings

    settings = _settings(
        Settings, model=model, device=device, threads=threads, host=host, nats_url=nats_url, metrics_port=metrics_port, state_dir=state_dir
    )
    if pull:
        _find_or_fetch(settings)
    from services.worker.app import run

    return run(settings)


@models.command("pull")
def models_pull(
    model: Annotated[str, typer.Argument(help="A catalogue name (see `headrace models list`) or hf:org/name.")], state_dir: StateDir = None
) -> int:
    """Fetch a model, so that it can be served without a network."""
    from services.local import fetch, state
    from services.local.console import Console
    from shared.settings import Settings

    home = state.prepare(_settings(Settings, state_dir=state_dir).state_dir)
    with Console().step(f"fetching {model}") as step:
        folder = fetch.pull(model, home, step.note)
    typer.echo(f"{folder.name}: {folder.path}")
    return 0


@models.command("list")
def models_list(state_dir: StateDir = None) -> int:
    """Show what can be fetched by name, and what is here already."""
    from services.local import fetch
    from shared.settings import Settings

    here = {folder.name: folder for folder in fetch.pulled(_settings(Settings, state_dir=state_dir).state_dir.expanduser())}
    for name in sorted({*fetch.CATALOGUE, *here}):
        typer.echo(f"{name}\t{here[name].path if name in here else '(not fetched)'}")
    return 0


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this and leave; without it, a conversation.")] = None,
    url: Annotated[str | None, typer.Option(help="The gateway.", show_default="http://127.0.0.1:$HEADRACE_PORT")] = None,
    state_dir: StateDir = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
) -> int:
    """Talk to a running instance. The key is HEADRACE_API_KEY, or the one that `headrace up` made."""
    from services.local.chat import Chat
    from services.local.options import client_host
    from shared.settings import Settings

    settings = _settings(Settings, state_dir=state_dir)
    key = settings.api_key.get_secret_value()
    kept = settings.state_dir.expanduser() / "api_key"
    if not key and kept.exists():
        key = kept.read_text().strip()
    talk = Chat(url or f"http://{client_host(settings.host)}:{settings.port}", key, max_tokens)
    return talk.once(message) if message is not None else talk.converse()


@app.command()
def version() -> int:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        typer.echo(installed("headrace"))
    except PackageNotFoundError:
        typer.echo("unknown (not installed)")
    return 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Return the exit code; whatever the user can mend is one line on standard error, anything else is a bug and raises."""
    try:
        result = app(arguments, prog_name="headrace", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        line = _one_line(error)
        if line is None:
            raise
        if line:  # a command without its subcommand has shown its help
            print(f"headrace: {line}", file=sys.stderr, flush=True)
        return 2 if hasattr(error, "format_message") else 1
    return int(result or 0)


def _one_line(error: Exception) -> str | None:
    """Return what to tell the user, or None for a bug of ours."""
    if hasattr(error, "format_message"):  # the command line parser's own errors, whose class has moved between versions
        return " ".join(str(error.format_message()).split())
    from services.local.state import LaunchError
    from shared.model_files import ModelError

    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, LaunchError | ModelError | OSError):  # an unreachable NATS is an OSError too
        return " ".join(str(error).split()) or type(error).__name__
    return None


S = TypeVar("S", bound="Settings")


def _settings(kind: type[S], **flags: object) -> S:
    """Read the environment, with the flags that were given over it.

    Raises:
        LaunchError: something in it cannot be; the message says which flag or variable.
    """
    from pydantic import ValidationError

    from services.local.state import LaunchError

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise LaunchError("; ".join(_complaint(str(e["loc"][0]) if e["loc"] else "", e["msg"], given) for e in error.errors())) from None


def _complaint(setting: str, message: str, given: Mapping[str, object]) -> str:
    message = message.removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not setting:
        return message
    return (f"--{setting.replace('_', '-')}: " if setting in given else f"HEADRACE_{setting.upper()}: ") + message


def _find_or_fetch(settings: Settings) -> None:
    from services.local import state
    from services.local.console import Console
    from services.local.model import find_or_fetch

    find_or_fetch(settings.model, state.prepare(settings.state_dir), settings.served_name, Console())


if __name__ == "__main__":
    main()
