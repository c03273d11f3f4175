"""The pure half of the client's side of permits: messages, limits and the client's queue decisions."""
