"""The runs of a sweep, on any launcher: each records how it ended, and a failed run does not end the others.

Every run leaves a record in the sweep's folder, and the command that started the sweep reads them in the end:
processes, machines and clusters need nothing in common but that folder. A run that is finished is recognised and left
alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite, nan, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim.app import sweep_progress
from fedsim.app.config import KEYS_WITHOUT_EFFECT, identifying_settings, resolved_settings
from fedsim.app.explain import explain_hydra_error, unresolvable_setting_reason, without_line_breaks
from fedsim.app.folders import checked_folder_name, new_folder, override_key
from fedsim.core import checks
from fedsim.core.errors import ConfigError, DivergenceError, OutputError
from fedsim.core.files import create_real_folder, replacement_file
from fedsim.core.lock import Lock
from fedsim.core.speaking import escape_unprintable

if TYPE_CHECKING:
    from fedsim.run.stopping import Stopped
    from fedsim.run.tracking import Result
    from fedsim.trainer import TaskGenerator

log = logging.getLogger(__name__)

STATUS_DESCRIPTIONS = {
    "done": "done",
    "kept": "finished before",
    "failed": "failed",
    "stopped": "stopped",
    "running": "unfinished",
}
TUNE_SWEEPER = "hydra_plugins.fedsim_tune.TuneSweeper"  # its trials are not jobs of the sweep and leave no records
ASKED_TO_STOP = "stopped by a signal"  # why a sweep ended early
RECORDS_FOLDER = ".runs"  # folder of a sweep's records
OPTUNA_RESULTS_FILE = "optimization_results.yaml"  # written by Optuna's sweeper at its end
# keys that are left out of the names of run folders
EXCLUDED_KEYS_SETTING = "hydra.job.config.override_dirname.exclude_keys"
SUMMARY, CONFIG = "summary.json", "config.yaml"  # a run writes the first at its end, the second at its start

FinalMetrics = dict[str, tuple[float, float]]


def print_to_stderr(*texts: str, **print_options: Any) -> None:
    """Print to the current standard error."""
    print(*map(escape_unprintable, texts), file=sys.stderr, **print_options)


@dataclass
class SweepRunRecord:
    """The status of a run of the sweep.

    Attributes:
        number: of the run in its sweep.
        overrides: that make it.
        folder: its run folder.
        status: one of WORDS.
        message: why, in one sentence.
    """

    number: int
    overrides: list[str]
    folder: str
    status: str = "running"
    message: str = ""

    def write(self, folder: Path) -> None:
        """Write the record atomically."""
        with replacement_file(create_real_folder(folder) / f"{self.number}.json") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def run_sweep_job(
    cfg: DictConfig, folder: Path, run: Callable[[], TaskGenerator[Result]], format_result: Callable[[Result], str]
) -> TaskGenerator[float | None]:
    """Yield the local work of one run of a sweep; return its objective, None if there is none or the run failed.

    Args:
        cfg: of the run.
        folder: of the run.
        run: does it.
        format_result: what is printed of its result.
    """
    hydra = HydraConfig.get()  # of this run; later the attribute may belong to another one
    record = SweepRunRecord(int(hydra.job.num), list(hydra.overrides.task), str(folder))
    return _run_sweep_job(cfg, folder, run, format_result, hydra, record)


def _run_sweep_job(
    cfg: DictConfig,
    folder: Path,
    run: Callable[[], TaskGenerator[Result]],
    format_result: Callable[[Result], str],
    hydra: Any,
    record: SweepRunRecord,
) -> TaskGenerator[float | None]:
    from fedsim.run.stopping import Stopped

    records = Path(hydra.sweep.dir) / RECORDS_FOLDER
    stop: Stopped | None = None
    value: float | None = None
    try:
        record.write(records)
        check_objective(cfg.objective, hydra.sweeper._target_, resolved_settings(cfg)["metrics"])
        final_metrics = finished_result(cfg, folder) if cfg.resume == "auto" else None
        if final_metrics is None:
            try:
                result = yield from run()
            except Stopped as stop_error:
                stop = stop_error
                result = _result_before_stop(stop_error)
            final_metrics = result.final
            record.status = "done"
            direction = hydra.sweeper.get("direction") if cfg.objective else None
            best = sweep_progress.best_run_text(records, folder, record.overrides, cfg.objective, direction)
            print(f"{sweep_progress.progress_text(records, record.number)} {format_result(result)}{best}", flush=True)
        else:
            record.status = "kept"
            log.info("finished before: %s", folder)
        value = _objective_value(cfg.objective, final_metrics)
    except (Stopped, Exception) as error:
        record.status, record.message = _failure(error, folder)
    except (KeyboardInterrupt, GeneratorExit):  # immediately: by a second signal, or outside of the rounds
        if record.status == "running":
            record.status, record.message = "stopped", "stopped at once, not after a round"
        raise
    finally:
        record.write(records)
    if stop is not None and hydra.runtime.choices["hydra/launcher"] in ("basic", "lockstep"):
        raise stop  # a signal to this process is meant for the whole sweep
    return value


def _result_before_stop(stop: Stopped) -> Result:
    """Return the result of a run that was stopped in its last round; raise its error if it failed or had further
    rounds to do."""
    if stop.__cause__ is not None:
        raise stop.__cause__ from None
    if stop.result is None:
        raise stop
    return stop.result


def _failure(error: BaseException, folder: Path) -> tuple[str, str]:
    """Return status and message of a run that raised an error. An error of code other than fedsim's is logged with
    its traceback, since one line in the sweep's summary would not show its origin."""
    from fedsim.run.stopping import Stopped

    if isinstance(error, Stopped):
        return "stopped", str(error)
    if isinstance(error, (ConfigError, DivergenceError, OutputError)):
        return "failed", str(error)
    if isinstance(error, OmegaConfBaseException):
        return "failed", explain_hydra_error(error)
    log.exception("run failed: %s", folder)
    return "failed", error_line(error)


def _grid_size(overrides: list[Any]) -> int:
    """Return the number of runs of a grid.

    Raises:
        Exception: a value is no list, such as a glob.
    """
    return prod(sum(1 for _ in override.sweep_string_iterator()) for override in overrides)


def finished_result(cfg: DictConfig, folder: Path) -> FinalMetrics | None:
    """Return the result of a run of exactly this configuration in this folder; None if it is not finished."""
    try:
        final_metrics = json.loads((folder / SUMMARY).read_text())["final"]
        stored_config = OmegaConf.load(folder / CONFIG)
        assert isinstance(stored_config, DictConfig)
        if identifying_settings(stored_config, KEYS_WITHOUT_EFFECT) != identifying_settings(cfg, KEYS_WITHOUT_EFFECT):
            return None
        results = {
            name: (summary["mean"], summary["std"]) for name, summary in final_metrics.items()
        }  # null: not a number
        return {
            name: (float(nan if m is None else m), float(nan if s is None else s)) for name, (m, s) in results.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AssertionError, yaml.YAMLError, OmegaConfBaseException):
        return None  # no file, or an incomplete one


def check_objective(name: str | None, sweeper: str = "", metrics: Any = ()) -> None:
    """Check before the first round that the objective is a metric, and that one is named if it is needed."""
    from fedsim.evaluation import COLUMN_DESCRIPTIONS
    from fedsim.evaluation.metrics import possible_columns
    from fedsim.evaluation.personal import PERSONAL_COLUMNS

    if name is None and "optuna" in sweeper:
        raise ConfigError(
            "objective=null, but Optuna needs a metric to judge a run by, such as objective=test_accuracy"
        )
    metric_names = {*COLUMN_DESCRIPTIONS, *PERSONAL_COLUMNS, *possible_columns(metrics)}
    if name is not None and str(name) not in metric_names:
        raise ConfigError(
            f"objective={name} is not a metric; test_accuracy is one{checks.nearest_name_hint(str(name), metric_names)}"
        )


def _objective_value(name: str | None, final_metrics: FinalMetrics) -> float | None:
    """Return the value that the sweeper optimises: the metric's mean over the replicates."""
    if name is None:
        return None
    if name not in final_metrics:
        raise ConfigError(f"objective={name} is not measured in this run; choose one of {', '.join(final_metrics)}")
    mean = final_metrics[name][0]
    if not isfinite(mean):
        raise DivergenceError(f"objective={name} ended as {mean}")
    return mean


def error_line(error: BaseException) -> str:
    """Return one line about an error of code other than fedsim's."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class SweepCallback(Callback):
    """Hydra's callback at the start of a sweep, in the process that was started; config.yaml names it.

    Attributes:
        records: folder of the records of the sweep that has begun here; None without one.
        tuned: does Optuna's sweeper look for an objective's best value?
        lock: of the sweep's folder, which is this process's until the sweep has ended.
    """

    records: ClassVar[Path | None] = None
    tuned: ClassVar[str | None] = None
    lock: ClassVar[Lock | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Lock the sweep's folder, delete the records of an earlier sweep there, and name the runs' folders by the
        settings that vary."""
        if problem := unresolvable_setting_reason(
            OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        ):
            sys.exit(f"fedsim: {problem}")  # exit, since Hydra turns errors of a callback into warnings
        override_texts = OmegaConf.to_container(config.hydra.overrides, resolve=False)["task"]  # type: ignore[call-overload, index]
        parsed_overrides = OverridesParser.create().parse_overrides([str(text) for text in override_texts])
        swept_keys = {
            override_key(override.get_key_element()) for override in parsed_overrides if override.is_sweep_override()
        }
        if "out" in swept_keys:
            sys.exit("fedsim: out is the folder of the whole sweep; inside it every run gets one by what varies")
        fixed_keys = sorted(
            {override_key(override.get_key_element()) for override in parsed_overrides} - swept_keys | {"out"}
        )
        # launchers compose each run again from these and the run's own overrides
        config.hydra.overrides.hydra.append(f"{EXCLUDED_KEYS_SETTING}=[{','.join(map(repr, fixed_keys))}]")
        try:
            if config.out is None:
                config.out = str(new_folder())
                config.hydra.overrides.hydra.append(f"out={config.out!r}")
            SweepCallback.lock = Lock(Path(checked_folder_name("out", config.out)))
        except ConfigError as error:
            sys.exit(f"fedsim: {without_line_breaks(str(error))}")
        except OSError as error:
            sys.exit(f"fedsim: out={config.out} cannot be made ({error.strerror}); choose another folder")
        if config.hydra.sweeper._target_ == TUNE_SWEEPER:
            return
        SweepCallback.records = Path(config.hydra.sweep.dir) / RECORDS_FOLDER
        SweepCallback.tuned = config.objective if "optuna" in config.hydra.sweeper._target_ else None
        for path in SweepCallback.records.glob("*"):
            path.unlink()
        swept_overrides = [override for override in parsed_overrides if override.is_sweep_override()]
        with contextlib.suppress(Exception):  # a pattern is not counted, and an unreadable folder is reported later
            tuning = "optuna" in config.hydra.sweeper._target_
            total = sweep_progress.num_tuning_trials(config.hydra.sweeper) if tuning else _grid_size(swept_overrides)
            if total is not None:
                SweepCallback.records.mkdir(parents=True, exist_ok=True)
                with replacement_file(
                    create_real_folder(SweepCallback.records) / sweep_progress.TOTAL_RUNS_FILE
                ) as file:
                    file.write(json.dumps([total, time.time()]))


def release_sweep_folder() -> None:
    """Release the folder of the sweep that began in this process."""
    if SweepCallback.lock is not None:
        SweepCallback.lock.release()
        SweepCallback.lock = None


def report_sweep_end(problem: str | None = None) -> bool:
    """Report how the sweep that began in this process ended; return True if all runs succeeded.

    Args:
        problem: what broke it off, in one sentence; None where the sweeper came to its end.
    """
    assert SweepCallback.records is not None
    folder = SweepCallback.records.parent
    release_sweep_folder()
    records = [SweepRunRecord(**json.loads(path.read_text())) for path in SweepCallback.records.glob("*.json")]
    records.sort(key=lambda record: record.number)
    if not records:
        print_to_stderr(
            f"fedsim: {problem or f'no run left a word in {SweepCallback.records}; do all machines see this folder?'}"
        )
        return False
    counts = Counter(record.status for record in records)
    counts_text = ", ".join(
        f"{counts[status]} {status_text}" for status, status_text in STATUS_DESCRIPTIONS.items() if counts[status]
    )
    total = max(len(records), sweep_progress.total_runs(SweepCallback.records) or 0)
    if total > len(records):
        counts_text += f", {total - len(records)} not started"
    print_to_stderr(f"sweep of {total} run{'s' * (total != 1)} in {folder}: {counts_text}")
    if counts["done"] + counts["kept"]:
        print_to_stderr(f"table:    fedsim table {folder}")
        print_to_stderr(f"curves:   tensorboard --logdir {folder}")
        print_to_stderr(f"pictures: fedsim-plot {folder} --out {folder}")
        print_to_stderr(f"report:   fedsim-plot {folder} --html {folder}/report.html")
    if SweepCallback.tuned and problem is None:
        best = OmegaConf.load(folder / OPTUNA_RESULTS_FILE)
        best_settings_text = " ".join(f"{name}={value}" for name, value in best.best_params.items())
        print_to_stderr(f"best {SweepCallback.tuned}: {best.best_value:.6g} with {best_settings_text}")
    unfinished_records = [record for record in records if record.status not in ("done", "kept")]
    for record in unfinished_records:
        reason = without_line_breaks(record.message) or "its process died without reporting, or still runs elsewhere"
        print_to_stderr(f"fedsim: {STATUS_DESCRIPTIONS[record.status]}: {_override_label(record, records)}: {reason}")
    if problem is not None and not (problem == ASKED_TO_STOP and counts["stopped"]):  # its messages name the signal
        print_to_stderr(f"fedsim: the sweep ended early: {problem}")
    if unfinished_records or problem:
        print_to_stderr(f"the same command with out={folder} runs the missing ones")
    return not unfinished_records and problem is None


def _override_label(record: SweepRunRecord, other_records: list[SweepRunRecord]) -> str:
    """Return the overrides in which a run differs from another run of its sweep."""
    common_overrides = set(record.overrides).intersection(*(other_record.overrides for other_record in other_records))
    differing_overrides = [override for override in record.overrides if override not in common_overrides]
    return " ".join(differing_overrides) or Path(record.folder).name
