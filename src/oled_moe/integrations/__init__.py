"""Offloaded experts inside the models of other libraries, a module each."""
