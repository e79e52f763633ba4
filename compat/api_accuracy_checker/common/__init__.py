"""The older tool's place for its settings: `api_accuracy_checker.common.config`."""
