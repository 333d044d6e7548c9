def any_is_long(trajectories):
    return max(len(each.response_tokens) for each in trajectories) > 2


def only_row_zero(trajectories):
    return trajectories[0].uid.endswith("/0")


def broken(trajectories):
    return trajectories[0].nothing
