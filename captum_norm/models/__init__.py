"""Where the parts of a model's attention blocks are, and how to declare them where they are not found."""

from captum_norm.models.layout_files import register_layouts
from captum_norm.models.layouts import Layout, Scope, Site, register_layout, registered_layouts

__all__ = ["Layout", "Scope", "Site", "register_layout", "register_layouts", "registered_layouts"]
