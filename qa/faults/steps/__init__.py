"""The steps that faults are injected into, one module per part of the product."""
