"""LightningModules that train as they are."""

from zae.addons.lightning.addon import LightningAddon, task_of

__all__ = ["LightningAddon", "task_of"]
