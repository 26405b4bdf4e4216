# Link the usual libraries of a release from the archives of libplk into `folder`: one shared
# library per archive, with upstream's target name, which is the name that other bindings load.
function(plk_dropin folder)
    add_custom_target(plk_dropin ALL)
    file(WRITE "${CMAKE_BINARY_DIR}/empty.cpp" "")
    foreach(archive ${ARGN})
        add_library(dropin-${archive} SHARED "${CMAKE_BINARY_DIR}/empty.cpp")
    endforeach()
    foreach(archive ${ARGN})
        set(target dropin-${archive})
        plk_link_whole(${target} ${archive})
        plk_links(${archive} links)
        foreach(link ${links})
            if(link IN_LIST ARGN)
                target_link_libraries(${target} PUBLIC dropin-${link})
            elseif(NOT TARGET ${link} OR NOT link MATCHES "^(ggml|llama)")
                target_link_libraries(${target} PRIVATE ${link})
            endif()
        endforeach()
        set_target_properties(${target} PROPERTIES
            OUTPUT_NAME ${archive}
            LIBRARY_OUTPUT_DIRECTORY "${folder}"
            LINKER_LANGUAGE CXX
            BUILD_WITH_INSTALL_RPATH ON
            INSTALL_RPATH "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>"
            INSTALL_NAME_DIR "@rpath")
        if(GGML_CUDA)
            # The loader does not search the directories of cuBLAS and the CUDA runtime.
            set_target_properties(${target} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
        endif()
        if(NOT APPLE)
            # Record only libraries that are used, as upstream's own link by the compiler does.
            target_link_options(${target} PRIVATE LINKER:--as-needed)
        endif()
        add_dependencies(plk_dropin ${target})
    endforeach()
endfunction()
