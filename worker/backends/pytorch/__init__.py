"""The PyTorch backend: TorchScript, torch.export and AOTInductor programs."""
