"""Keep the steps that faults are tried on, one module per part of the product."""
