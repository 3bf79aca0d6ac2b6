"""A stand-in for what the CUDA driver and torch do with page-locked memory, on a machine without either."""

import torch

PAGE = 4096
INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED = 1, 712, 713


class Driver:
    """The part of the CUDA runtime that locks pages, with its rules: no page twice, nothing unlocked that is not locked.

    ``taken_by_torch`` counts bytes of torch's own page-locked allocator, which rounds each request up to a power of two.
    ``refuses`` is the status of every refused request. ``stale`` is the refusal that the next kernel launch would raise.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.taken_by_torch = 0
        self.refuses = 0
        self.stale = 0

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return what ``Tensor.is_pinned`` would: whether all of the tensor's bytes are locked."""
        first, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        return any(start <= first and first + size <= start + length for start, length in self.locked.items())

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - the runtime's name
        status = self.refuses or self._fault(address, size)
        if status:
            self.stale = status
        else:
            self.locked[address] = size
        return status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the runtime's name
        return 0 if self.locked.pop(address, None) is not None else NOT_REGISTERED

    def _fault(self, address: int, size: int) -> int:
        if size <= 0:
            return INVALID_VALUE
        pages = range(address // PAGE, (address + size - 1) // PAGE + 1)
        for start, length in self.locked.items():
            if pages.start <= (start + length - 1) // PAGE and start // PAGE < pages.stop:
                return ALREADY_REGISTERED
        return 0


def install(monkeypatch) -> Driver:
    """Put the stand-in where torch looks for the runtime. A launch on the device raises a refusal that nobody has read."""
    driver, empty, zeros = Driver(), torch.empty, torch.zeros

    def pinned_or_plain(*size, pin_memory=False, **options):
        made = empty(*size, **options)
        if pin_memory and made.numel():
            driver.taken_by_torch += 1 << (made.numel() * made.itemsize - 1).bit_length()
        return made

    def launched(*size, device=None, **options):
        if torch.device(device or "cpu").type == "cpu":
            return zeros(*size, **options)
        if driver.stale:
            status, driver.stale = driver.stale, 0
            raise RuntimeError(f"CUDA error: status {status}\nSearch for it in the runtime's list of errors.")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "empty", pinned_or_plain)
    monkeypatch.setattr(torch, "zeros", launched)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    # CPU tensors are page-locked where the driver holds them; torch's own copy is rounded, and locked as well.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: driver.holds(tensor))
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: pinned_or_plain(tensor.shape, pin_memory=True, dtype=tensor.dtype).copy_(tensor),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return driver
