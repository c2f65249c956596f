"""The names of layers that several published classes share."""

#: `WideResNet` of TRADES, which AT_HE and RobustBench also use.
WIDE_RESNET = {
    "conv1": "stem_conv",
    "block{stage}.layer.{block-}.bn{n}": "stage{stage}_block{block}_{n}_bn",
    "block{stage}.layer.{block-}.conv{n}": "stage{stage}_block{block}_{n}_conv",
    "block{stage}.layer.{block-}.convShortcut": "stage{stage}_block{block}_shortcut_conv",
    "bn1": "final_bn",
}
#: A block that the class creates and never calls, and a counter.
WIDE_RESNET_IGNORED = ("sub_block1.*", "*.num_batches_tracked")
#: `PreActResNet` of the widespread CIFAR code.
PREACT_RESNET = {
    "conv1": "stem_conv",
    "layer{stage}.{block-}.bn{n}": "stage{stage}_block{block}_{n}_bn",
    "layer{stage}.{block-}.conv{n}": "stage{stage}_block{block}_{n}_conv",
    "layer{stage}.{block-}.shortcut.0": "stage{stage}_block{block}_shortcut_conv",
    "bn": "final_bn",
}
#: `ResNet` of the same code ("shortcut") and of torchvision ("downsample").
RESNET = {
    "conv1": "stem_conv",
    "bn1": "stem_bn",
    "layer{stage}.{block-}.bn{n}": "stage{stage}_block{block}_{n}_bn",
    "layer{stage}.{block-}.conv{n}": "stage{stage}_block{block}_{n}_conv",
    "layer{stage}.{block-}.shortcut.0": "stage{stage}_block{block}_shortcut_conv",
    "layer{stage}.{block-}.shortcut.1": "stage{stage}_block{block}_shortcut_bn",
    "layer{stage}.{block-}.downsample.0": "stage{stage}_block{block}_shortcut_conv",
    "layer{stage}.{block-}.downsample.1": "stage{stage}_block{block}_shortcut_bn",
}
#: DeepMind's networks: Swish, and Keras's "same" padding.
DEEPMIND_OPTIONS = {"activation": "swish", "padding": "same"}
#: The buffers of RobustBench's classes that standardise the images.
ROBUSTBENCH_STATISTICS = (("mu", "sigma"),)
