"""What needs an NVIDIA GPU to be measured or tested, for machines that may reach no package registry."""
