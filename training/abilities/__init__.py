"""What the embedded model can do, one module an ability; each draws exchanges from a `Draw`."""
