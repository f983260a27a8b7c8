"""YAML files: `--config-dir` takes this folder, `hydra.searchpath=[pkg://mypackage.configs]` this package."""
