"""torchvision's models, scripted and run in fused groups, beside the scripts themselves."""
