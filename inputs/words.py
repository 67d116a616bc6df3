"""Numbers of things in words. Nothing here needs a library."""


def counted(number: int, one: str, several: str | None = None) -> str:
    """A number of things, such as '1 batch' and '2,000 batches'.

    Args:
        number: of them.
        one: what one is called.
        several: what more of them are called; None: the same with an s.
    """
    if number == 1:
        return f'1 {one}'
    return f'{number:,} {several or one + "s"}'
