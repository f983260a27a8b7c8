"""The names of a run's files; those of metrics.csv and clients.npz stand with what writes them."""

CONFIG_FILE = "config.yaml"  # a run writes it as it begins
ENVIRONMENT_FILE = "environment.json"
CONSTANTS_FILE = "constants.safetensors"  # entries of the model that no client changes, where there are any
CHECKPOINT_FILE = "checkpoint.safetensors"
BEST_MODELS_FILE = "best.safetensors"  # models that were best so far, where there is a metric to choose them by
MODEL_HEADER_KEY = "model"  # where the header of either tells the names of a model's parts
SUMMARY_FILE = "summary.json"  # a run writes it last
