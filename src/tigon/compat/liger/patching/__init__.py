"""Mirrors what patches models in `liger_kernel.transformers`: `monkey_patch`, `auto_model`, `trainer_integration`."""
