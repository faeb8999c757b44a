"""Where the parts of a model's layers are, and how to declare them where they are not found."""

from captum_norm.models.feed_forward import FeedForwardLayout, register_feed_forward, registered_feed_forwards
from captum_norm.models.layouts import Layout, Scope, Site, register_layout, registered_layouts

__all__ = [
    "FeedForwardLayout",
    "Layout",
    "Scope",
    "Site",
    "register_feed_forward",
    "register_layout",
    "registered_feed_forwards",
    "registered_layouts",
]
