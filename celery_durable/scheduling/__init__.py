"""Background loops: due work, early wake, re-arm after an error. Used by the dispatcher and the holder."""
