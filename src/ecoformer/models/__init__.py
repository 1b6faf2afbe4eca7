"""Models: one file per family. Importing this package registers the vision models with timm."""

import warnings

from ecoformer.third_party import import_timm

try:
    import_timm()
except (ImportError, AttributeError, TypeError) as error:  # the text encoders do not need timm
    if getattr(error, "name", None) != "timm":
        warnings.warn(f"the vision models are not registered with timm: {error}", stacklevel=2)
