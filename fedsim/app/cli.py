"""The `fedsim` command: a Hydra application whose errors are one sentence."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.app import commands, help_page, hydra_section, per_choice, sweep
from fedsim.app.build import build
from fedsim.app.config import config_folder, groups, resolved_settings
from fedsim.app.explain import (
    composition_error_text,
    explain_hydra_error,
    unresolvable_setting_reason,
    without_line_breaks,
)
from fedsim.app.folders import RESUME_MODES, override_key, run_folder
from fedsim.app.imports import import_run_modules
from fedsim.app.log_scale import accept_log_intervals
from fedsim.app.single_composition import reuse_composition
from fedsim.core.errors import ConfigError, DivergenceError, OutputError, PeerError, RunError
from fedsim.core.lock import check_folder_unlocked
from fedsim.core.settings import flatten_settings
from fedsim.core.speaking import ignore_broken_pipes, log_messages_once, log_to_stderr, tolerate_broken_pipes

if TYPE_CHECKING:  # modules that import PyTorch take seconds, and help and shell completion do not need them
    from fedsim.core.ranks import ProcessRanks
    from fedsim.run.simulation import Simulation
    from fedsim.run.stopping import Stopped
    from fedsim.run.tracking import Result
    from fedsim.trainer import TaskGenerator

    Drive = Callable[..., TaskGenerator[Result]]

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point of `fedsim` and `python -m fedsim`."""
    with tolerate_broken_pipes():
        _main()


def _main() -> None:
    """Run a command of `fedsim.app.commands`, or pass overrides to Hydra."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us instead of being printed by Hydra
    _prepare_imports_and_logging()
    if sys.argv[1:2] and sys.argv[1] in commands.COMMAND_DESCRIPTIONS:
        try:
            return commands.run_subcommand(sys.argv[1], sys.argv[2:])
        except (HydraException, OmegaConfBaseException) as error:  # of a command that composes a configuration
            sys.exit(f"fedsim {sys.argv[1]}: {explain_hydra_error(error)}")
    sys.argv[1:] = per_choice.add_plus_prefix(flags_first(sys.argv[1:]))
    problem = _hand_to_hydra()
    if sweep.SweepCallback.records is not None and not sweep.report_sweep_end(problem):
        sys.exit(1)


def _hand_to_hydra() -> str | None:
    """Let Hydra call `_run_job`, once or for every run of a sweep; return the error that ended a sweep, or None."""
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_distributed:
        _check_single_run()
        handlers: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    else:
        handlers = _sigterm_interrupts()
    try:
        with (
            hydra_section.refuse_unsafe_hydra_sections(), reuse_composition(), accept_log_intervals(),
            help_page.order_help_groups(), handlers,
        ):  # fmt: skip
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(_run_job)()
    except (HydraException, OmegaConfBaseException) as error:
        if sweep.SweepCallback.records is None:
            sys.exit(f"fedsim: {explain_hydra_error(error)}")
        return explain_hydra_error(error)
    except (Exception, KeyboardInterrupt) as error:  # of a launcher or sweeper; those of runs are in its records
        if sweep.SweepCallback.records is None:
            if isinstance(error, (ValueError, OSError)) and not _is_raised_by_run(error):
                sys.exit(f"fedsim: {composition_error_text(error)}")
            if isinstance(error, KeyboardInterrupt):
                sys.exit("fedsim: stopped at once, not after a round")
            raise
        if isinstance(error, KeyboardInterrupt):
            return sweep.ASKED_TO_STOP
        return sweep.error_line(error)
    return None


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that a sweep that is stopped
    between two runs still reports its end. During a run `fedsim.run.stopping` handles all three. Not used for
    ranks, which may wait for one another where no Python code runs: SIGTERM must end them there."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        stop_signals = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
        for number in (number for number in stop_signals if number and signal.getsignal(number) == signal.SIG_DFL):
            previous_handlers[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def flags_first(arguments: list[str]) -> list[str]:
    """Return the arguments with overrides last: Hydra reads none of them if some stand before a flag and some
    behind it."""
    overrides = [text for text in arguments if not text.startswith("-") and (text.startswith("~") or "=" in text)]
    return [text for text in arguments if text not in overrides] + overrides


def _is_raised_by_run(error: BaseException) -> bool:
    """Return whether a run raised the error, and not Hydra before the run."""
    return any(frame.f_code is _run_job.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _check_single_run() -> None:
    """Check that several ranks are given a single run, not a sweep."""
    if {"-m", "--multirun"} & set(sys.argv):
        sys.exit("fedsim: a sweep (-m) cannot be divided among ranks; start torchrun once for every run")


def _prepare_imports_and_logging() -> None:
    """Prepare a process: put the user's own package on the import path, as `python -m` does, and show logs."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    threading.excepthook = _end_on_thread_error
    ignore_broken_pipes()  # a launcher's worker process does not start in `main`
    log_to_stderr()
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs what it raises
    logging.getLogger("fedsim").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)


def _end_on_thread_error(hook_args: threading.ExceptHookArgs) -> None:
    """End the process with the error of TensorBoard's thread; the run meets the same error when it flushes."""
    if not isinstance(hook_args.exc_value, OSError):
        threading.__excepthook__(hook_args)


def _run_job(cfg: DictConfig) -> float | None:
    """Execute one run. A sweep has several, which a launcher may execute in other processes and on other machines."""
    import_run_modules()
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        from fedsim.run.determinism import numerical_settings
        from fedsim.trainer import run_to_completion

        with numerical_settings(cfg.deterministic is True):
            return run_to_completion(sweep_run_local_tasks(cfg))
    _prepare_imports_and_logging()
    if problem := unresolvable_setting_reason(cfg):
        sys.exit(f"fedsim: {problem}")
    if any(text.startswith("objective=") for text in _override_texts(hydra_config.overrides)):
        log.warning("objective has no effect in a single run; it is the metric that a tuning sweep optimises")
    _execute_single_run(cfg, hydra_config.run.dir)
    return None


def _execute_single_run(cfg: DictConfig, hydra_folder: str) -> None:
    """Execute the one run of this process, or of its rank: print its results, or end the process with one sentence
    that says why it failed and what to do."""
    from fedsim.core.ranks import ProcessRanks
    from fedsim.run.stopping import Stopped
    from fedsim.trainer.device_memory import device_memory_error_text, is_out_of_memory

    ranks, folder, choices, has_default_folder = ProcessRanks(), Path(), _choice_by_group(), cfg.out is None
    try:
        ranks = ProcessRanks.join_group()
        folder = _choose_run_folder(cfg, ranks, hydra_folder)
        result = _run_raising_failure(cfg, folder, choices, ranks)
    except ConfigError as error:
        if has_default_folder:  # the folder was created for this run, which has written nothing to it
            _remove_if_empty(folder)
        sys.exit(f"fedsim: {without_line_breaks(str(error))}")
    except DivergenceError as error:
        _end_all_ranks(
            ranks,
            f"{error}" + (f"\nfedsim: the last good checkpoint is kept in {folder}" if _has_checkpoint(folder) else ""),
        )
    except RunError as error:
        sys.exit(f"fedsim: {error}\nfedsim: {_resume_hint(folder)}")
    except OutputError as error:
        sys.exit(f"fedsim: {error}; make room there, and {_resume_hint(folder)}")
    except Stopped as stop:
        _exit_after_stop(stop, folder, ranks)
    except PeerError as error:
        _end_without_peers(error, folder)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"fedsim: {device_memory_error_text(str(cfg.device))}\nfedsim: {_resume_hint(folder)}")
    ranks.leave_group()
    _print_report(result, ranks)


def _run_raising_failure(cfg: DictConfig, folder: Path, choices: dict[str, str], ranks: ProcessRanks) -> Result:
    """Run as `run` does; if a run was asked to stop and then failed, raise the failure."""
    from fedsim.run.stopping import Stopped

    try:
        return run(cfg, folder, choices, ranks, _steps_logging_folder)
    except Stopped as stop:
        if stop.__cause__ is not None:
            raise stop.__cause__ from None
        raise


def _steps_logging_folder(simulation: Simulation, folder: Path, *arguments: Any) -> TaskGenerator[Result]:
    """Yield the steps of a run; its folder is logged once it exists, and not before an error of the configuration."""
    steps, logged = simulation.run_as_generator(folder, *arguments), False
    try:
        local_task = next(steps)
        log.info("run: %s", folder)
        logged = True
        while True:
            local_task = steps.send((yield local_task))
    except StopIteration as end:
        if not logged:  # a run that has no round left
            log.info("run: %s", folder)
        result: Result = end.value
        return result
    finally:
        steps.close()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # rmdir fails for a folder that is not empty, as intended
        folder.rmdir()


def _exit_after_stop(stop: Stopped, folder: Path, ranks: ProcessRanks) -> NoReturn:
    """End the process after a run that was stopped after a round; print its results if that was its last round."""
    if stop.result is None:
        _end_all_ranks(ranks, f"{stop}; go on with the same command and {_resume_overrides(folder)}")
    _print_report(stop.result, ranks)
    _end_all_ranks(ranks, f"{stop}; all of it is in {folder}")


def _print_report(result: Result, ranks: ProcessRanks) -> None:
    if ranks.is_main_rank:
        print(report(result), flush=True)


def _end_without_peers(error: PeerError, folder: Path) -> NoReturn:
    """End a rank whose peers are gone: report the error and exit at once, since torchrun is about to end this
    process."""
    sweep.print_to_stderr(
        f"fedsim: {error}; if {folder} has a checkpoint, any number of ranks goes on from it with the same command "
        f"and {_resume_overrides(folder)}\n",
        end="",  # one write call: other ranks write to the same terminal
        flush=True,
    )
    os._exit(1)  # in a normal exit, the group's threads wait for a rank that has ended and may abort the process


def _has_checkpoint(folder: Path) -> bool:
    """Return whether the run has left a checkpoint."""
    from fedsim.run.checkpoint import NAME

    return (folder / NAME).exists()


def _resume_hint(folder: Path) -> str:
    """Return a hint how to continue a failed run."""
    if not _has_checkpoint(folder):
        return "run the same command again"
    return f"go on with the same command and {_resume_overrides(folder)}"


def _resume_overrides(folder: Path) -> str:
    """Return the overrides with which a command continues the run in this folder."""
    return f"resume=auto out={folder}"


def _choose_run_folder(cfg: DictConfig, ranks: ProcessRanks, of_hydra: str) -> Path:
    """Choose the folder of a run; with several ranks, the first one creates a folder that has no name yet."""
    if of_hydra != ".":
        raise ConfigError(f"hydra.run.dir={of_hydra} is not where a run writes; set out={of_hydra}")
    folder, problem = Path(), ""
    if ranks.is_main_rank:
        try:
            folder = run_folder(cfg.out, cfg.resume)
        except ConfigError as error:
            problem = str(error)
    folder, problem = ranks.broadcast_object((folder, problem))
    if problem:
        raise ConfigError(problem)
    cfg.out = str(folder)
    return folder


def sweep_run_local_tasks(
    cfg: DictConfig, shared: dict[str, Any] | None = None, run_rounds: Drive | None = None
) -> TaskGenerator[float | None]:
    """Yield the local work of one run of a sweep; `shared` are data sets of other runs, as `build` takes them,
    `run_rounds` as `run_steps` takes it."""
    _prepare_imports_and_logging()
    hydra_config = HydraConfig.get()
    launcher, folder = hydra_config.runtime.choices["hydra/launcher"], Path(hydra_config.runtime.output_dir)
    log_messages_once("fedsim.run.settings")  # most settings are given for all jobs
    if cfg.resume is None:
        cfg.resume = "auto"
    with contextlib.suppress(ConfigError):  # the run's own steps raise the error again, and it is recorded
        per_choice.apply_choice_settings(cfg, _choice_by_group(), _override_texts(hydra_config.overrides))
    if launcher == "lockstep" or (launcher != "basic" and sys.stderr.isatty()):
        cfg.tracking.progress = "none"  # progress bars of several jobs would overwrite each other
    run = functools.partial(run_as_generator, cfg, folder, _choice_by_group(), shared=shared, run_rounds=run_rounds)
    return sweep.run_sweep_job(cfg, folder, run, one_line_result)


def _override_texts(overrides: Any) -> list[str]:
    """Return the overrides of a run as they were written, KEY=VALUE."""
    return [str(text) for text in OmegaConf.to_container(overrides, resolve=False)["task"]]  # type: ignore[call-overload, index]


def _choice_by_group() -> dict[str, str]:
    """Return the choices of the groups of this run, without Hydra's own groups."""
    return {k: v for k, v in HydraConfig.get().runtime.choices.items() if not k.startswith("hydra") and v}


def _end_all_ranks(ranks: ProcessRanks, message: str) -> NoReturn:
    """End all ranks for the same reason: the first one reports it, and the others give it time to do so."""
    sys.exit(f"fedsim: {message}" if ranks.is_main_rank else 0)


def run(
    cfg: DictConfig,
    folder: Path,
    choices: dict[str, str],
    ranks: ProcessRanks | None = None,
    run_rounds: Drive | None = None,
) -> Result:
    """Build and run one configuration in its run folder. `choices` are the choices of its groups, for the table of
    runs; see `run_steps` for `run_rounds`."""
    from fedsim.run.determinism import numerical_settings
    from fedsim.trainer import run_to_completion

    with numerical_settings(cfg.deterministic is True):
        return run_to_completion(run_as_generator(cfg, folder, choices, ranks, run_rounds=run_rounds))


def run_as_generator(
    cfg: DictConfig,
    folder: Path,
    choices: dict[str, str],
    ranks: ProcessRanks | None = None,
    shared: dict[str, Any] | None = None,
    trusted: Sequence[str] | None = None,
    run_rounds: Drive | None = None,
) -> TaskGenerator[Result]:
    """Yield the local work of a run that `run` executes. `shared` are data sets of other runs, as `build` takes
    them; `trusted` are the packages that the user named, None: those that the overrides of this process name.
    `run_rounds` takes the simulation and the arguments of `Simulation.run_as_generator`, and is used in its place."""
    from fedsim.core.ranks import ProcessRanks
    from fedsim.run.checkpoint import NAME as CHECKPOINT
    from fedsim.run.tracking import RunConfig

    ranks = ranks or ProcessRanks()
    if ranks.is_main_rank:
        check_folder_unlocked(folder)  # before the content of the folder is read
    resume = "never" if cfg.resume is None else str(cfg.resume)
    has_checkpoint = ranks.broadcast_object((folder / CHECKPOINT).exists())
    if has_checkpoint and resume == "never":
        raise ConfigError(
            f"out={folder} already holds a run; add resume=auto to go on with it, resume=overwrite to "
            "start again, or choose another out"
        )
    if not has_checkpoint and resume not in RESUME_MODES:
        raise ConfigError(f"resume={resume}: no checkpoint there; use resume=auto with out=FOLDER, or an existing run")
    overrides = _override_texts(HydraConfig.get().overrides) if HydraConfig.initialized() else []
    override_values = {override_key(text): text.partition("=")[2] for text in overrides}
    for group in override_values.keys() & groups().keys() - {"uplink"}:  # its choices are stages, applied in order
        if (value := override_values[group]).startswith("["):  # Hydra would merge their keys
            raise ConfigError(f"{group}={value} are several choices, not one; add -m and {group}={value[1:-1]}")
    per_choice.apply_choice_settings(cfg, choices, overrides)
    sweep.check_objective(cfg.objective, metrics=resolved_settings(cfg)["metrics"])
    if trusted is None:
        # only the command itself extends trust: a file of somebody else's, or a sweeper's list in it, does not
        by_command = "trusted" in override_values and "trusted" not in _sweeper_parameter_keys()
        trusted = cfg.trusted if by_command else ()
    packages = list(trusted) if isinstance(trusted, Sequence) else []  # `build` rejects values that are not lists
    simulation, tracking, identity = build(cfg, ranks, shared, packages)
    config = RunConfig(identity, choices | run_settings_row(identity), OmegaConf.to_yaml(cfg, resolve=True))
    arguments = (folder, resume != "overwrite", tracking, config)
    return (
        yield from (
            simulation.run_as_generator(*arguments) if run_rounds is None else run_rounds(simulation, *arguments)
        )
    )


def _sweeper_parameter_keys() -> set[str]:
    """Return the keys that a sweep varies because a file says so, not the command."""
    params = HydraConfig.get().sweeper.get("params") if HydraConfig.initialized() else None
    return {override_key(f"{key}=") for key in params or {}}


def run_settings_row(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run for a table of runs: without class paths and duplicates (local.lr is lr)."""
    settings = dict(flatten_settings(identity))
    duplicated_keys = {
        key for key, value in settings.items() if "." in key and settings.get(key.rpartition(".")[2], ...) == value
    }
    return {
        key: value for key, value in settings.items() if key not in duplicated_keys and not key.endswith("_target_")
    }


def one_line_result(result: Result) -> str:
    """Return the line that a finished run of a sweep prints; the sweep prints hints for all runs at its end."""
    from fedsim.app.job_progress import LEADING_METRICS
    from fedsim.run.tracking.result import format_spread

    names = [name for name in LEADING_METRICS if name in result.final][:3] or list(result.final)[:3]
    metrics = ", ".join(f"{name} {result.final[name][0]:.4g}{format_spread(result.final[name][1])}" for name in names)
    stop_note = f", stopped by {result.stopped}" if result.stopped else ""
    return f"{metrics} after {result.history[-1]['round']} rounds in {result.seconds:.1f} s{stop_note}: {result.folder}"


def report(result: Result) -> str:
    """Return the report that a finished run prints."""
    from fedsim.run.tracking.result import format_spread

    width = max(24, *map(len, result.final))
    lines = [f"  {name:{width}} {mean:.4g}{format_spread(std)}" for name, (mean, std) in result.final.items()]
    speed = result.samples / max(result.seconds, 1e-9)
    return "\n".join(
        [
            *([f"stopped by {result.stopped}"] if result.stopped else []),
            f"after {result.history[-1]['round']} rounds in {result.seconds:.1f} s ({speed:,.0f} samples/s):",
            *lines,
            f"saved in {result.folder}",
            f"curves:   tensorboard --logdir {result.folder}",
            f"pictures: fedsim-plot {result.folder}",
            f"report:   fedsim-plot {result.folder} --html {result.folder}/report.html",
        ]
    )
