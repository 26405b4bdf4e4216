"""Run scenarios on stock and patched builds, and decide the verdict of a patch."""
