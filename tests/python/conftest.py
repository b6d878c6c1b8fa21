import importlib.util

HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if HAS_TORCH else ["torch_scaler_test.py", "torch_optim_test.py"]


def pytest_terminal_summary(terminalreporter):
    if not HAS_TORCH:
        terminalreporter.write_line("headroom.torch was not tested: PyTorch cannot be imported.")
