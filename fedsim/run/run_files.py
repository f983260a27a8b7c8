"""The names of a run's files; those of metrics.csv and clients.npz stand with what writes them."""

CONFIG_FILE = "config.yaml"  # written by a run at its start
ENVIRONMENT_FILE = "environment.json"
CONSTANTS_FILE = "constants.safetensors"  # entries of the model that no client changes, if there are any
CHECKPOINT_FILE = "checkpoint.safetensors"
BEST_MODELS_FILE = "best.safetensors"  # the best models so far, if there is a metric to choose them by
MODEL_HEADER_KEY = "model"  # the header entry of either with the names of a model's parts
SUMMARY_FILE = "summary.json"  # a run writes it last
